"""Drives a model runner as the engine would, without its scheduler: plans by hand, blocks from a list."""

from __future__ import annotations

from dataclasses import dataclass, field

from servelite.ipc.messages import FLAG, NewRow, Plan, SamplingParams, StepResult, TokenLogprobs, pack, unpack
from servelite.worker.base import ModelRunner


@dataclass
class Request:
    """A request and what has been sampled for it."""

    prompt: list[int]
    sampling: SamplingParams
    seed: int = 0
    choice: int = 0
    row: int = -1
    computed: int = 0
    blocks: int = 0
    output: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def done(self) -> bool:
        stopped = bool(self.output) and self.output[-1] in self.sampling.stop_token_ids
        return stopped or len(self.output) >= self.sampling.max_tokens

    @property
    def remaining(self) -> int:
        """Tokens whose place is known and that are not computed."""
        return len(self.prompt) + len(self.output) - self.computed


class Driver:
    """Runs requests to their end, all admitted at once, at most `chunk` tokens a row and step."""

    def __init__(self, runner: ModelRunner, first_step: int = 0, first_free: int = 0) -> None:
        """`first_free`: the blocks before it stay nobody's."""
        self.runner = runner
        self.step = first_step
        self.groups = len(runner.facts.kv_groups)
        self.free = list(range(first_free, runner.facts.num_blocks))[::-1]
        self.generation = 0

    def run(self, requests: list[Request], chunk: int = 1 << 30) -> list[list[int]]:
        """The output tokens of each request; the rows are shuffled against the order of requests."""
        size = self.runner.facts.block_size
        owned: list[int] = []
        fresh = []
        self.generation += 1
        for place, request in enumerate(requests):
            request.row = len(requests) - 1 - place
            fresh.append(
                NewRow(
                    row=request.row,
                    generation=self.generation,
                    tokens=pack(request.prompt + request.output),
                    prompt_len=len(request.prompt),
                    num_computed=0,
                    seed=request.seed,
                    choice=request.choice,
                    sampling=request.sampling,
                )
            )
        while live := [r for r in requests if not r.done]:
            counts = [min(chunk, r.remaining) for r in live]
            logits = [self.num_logits(r, n) for n, r in zip(counts, live, strict=True)]
            new_blocks = [-(-(r.computed + n) // size) - r.blocks for n, r in zip(counts, live, strict=True)]
            blocks = [self.free.pop() for _ in range(sum(new_blocks) * self.groups)]
            owned += blocks
            plan = self.plan(live, counts, logits, new_blocks, blocks, tuple(fresh))
            fresh = []
            self.runner.forward(plan)
            result = self.runner.sample(plan, None)
            for r, n, b in zip(live, counts, new_blocks, strict=True):
                r.computed += n
                r.blocks += b
            self.take([r for r, n in zip(live, logits, strict=True) if n], result)
            for r in live:
                if r.row in result.prompt_logprobs:
                    r.prompt_logprobs.append(result.prompt_logprobs[r.row])
                if r.row in result.logprobs:
                    r.logprobs.append(result.logprobs[r.row])
        self.free += owned
        return [r.output for r in requests]

    def plan(
        self,
        live: list[Request],
        counts: list[int],
        logits: list[int],
        new_blocks: list[int],
        blocks: list[int],
        fresh: tuple[NewRow, ...],
    ) -> Plan:
        """The next step's plan."""
        self.step += 1
        return Plan(
            epoch=1,
            step=self.step,
            rows=pack([r.row for r in live]),
            generations=pack([self.generation] * len(live)),
            num_tokens=pack(counts),
            num_drafts=b"",
            num_logits=pack(logits),
            block_counts=pack(new_blocks * self.groups),
            block_ids=pack(blocks),
            new_rows=fresh,
        )

    @staticmethod
    def num_logits(request: Request, count: int) -> int:
        """Of a step that computes `count` tokens of the request."""
        if request.sampling.prompt_logprobs >= 0 and request.computed < len(request.prompt):
            return count
        return int(count == request.remaining)

    def take(self, asked: list[Request], result: StepResult) -> None:
        """Append what the step sampled; `asked` are those with logits, `computed` is counted already."""
        assert unpack(result.rows).tolist() == [r.row for r in asked]
        counts = unpack(result.counts).tolist()
        assert counts == [int(r.remaining == 0) for r in asked]
        tokens, flags = iter(unpack(result.tokens).tolist()), unpack(result.flags, FLAG).tolist()
        for request, count, flag in zip(asked, counts, flags, strict=True):
            if count:
                request.output.append(next(tokens))
                request.flags.append(flag)
        assert next(tokens, None) is None
