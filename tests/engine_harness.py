"""An engine core in this process, without sockets: tests hand it messages and turn its loop by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from servelite.config import Settings
from servelite.engine.build import build_engine
from servelite.engine.mailbox import Event
from servelite.engine.scheduler import Scheduler
from servelite.executor.base import Executor
from servelite.executor.in_process import InProcessExecutor
from servelite.executor.multi_process import MultiProcessExecutor
from servelite.ipc.messages import (
    FLAG,
    NUMBER,
    Abort,
    Add,
    FinishReason,
    KVGroup,
    Load,
    Outputs,
    Pooling,
    RequestError,
    RunnerFacts,
    SamplingParams,
    pack,
    unpack,
)
from servelite.ipc.progress import ProgressPage
from servelite.tokenizer.block_hashes import block_hashes
from servelite.tokenizer.grammar import Grammars
from servelite.worker.base import ModelRunner
from servelite.worker.simulated import SimulatedRunner

CLIENT = 0


@dataclass
class Answer:
    """What a front end would have of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    error: RequestError | None = None
    vector: bytes = b""


@cache
def shared_page() -> ProgressPage:
    """One page for all harnesses: thousands are made in a run, and each page is two descriptors."""
    return ProgressPage.create()


class MemoryMailbox:
    """Fulfils `Mailbox`; checks delivery as a front end would."""

    def __init__(self) -> None:
        self.inbox: list[tuple[int, Event]] = []
        self.answers: dict[int, Answer] = {}
        self.load = Load()
        self.produced: dict[int, int] = {}  # tokens a resume starts with
        self.waits: list[float | None] = []

    def receive(self, timeout: float | None) -> Iterator[tuple[int, Event]]:
        self.waits.append(timeout)
        while self.inbox:
            yield self.inbox.pop(0)

    def send(self, client: int, outputs: Outputs) -> None:
        assert client == CLIENT
        self.load = outputs.load
        tokens, at = unpack(outputs.tokens).tolist(), 0
        columns = zip(
            unpack(outputs.requests, NUMBER).tolist(),
            unpack(outputs.first_index).tolist(),
            unpack(outputs.counts).tolist(),
            unpack(outputs.finish, FLAG).tolist(),
            strict=True,
        )
        for number, first, count, finish in columns:
            answer = self.answers.setdefault(number, Answer())
            assert answer.finish is FinishReason.NONE, f"request {number} was told more after its end"
            if count:
                assert first == len(answer.tokens) + self.produced.get(number, 0), (
                    "a token came twice or never"
                )
            answer.tokens += tokens[at : at + count]
            at += count
            answer.finish = FinishReason(finish)
            answer.error = outputs.errors.get(number)
            answer.vector = outputs.vectors.get(number, b"")
        assert at == len(tokens)

    def clients(self) -> list[int]:
        return [CLIENT]


class Harness:
    """One engine over one runner."""

    def __init__(
        self,
        settings: Settings,
        runner: ModelRunner | MultiProcessExecutor,
        *,
        epoch: int = 1,
        load_grammars: Callable[[], Grammars] | None = None,
    ) -> None:
        """`runner`: one for this process, or what drives those of other processes."""
        self.settings, self.mailbox = settings, MemoryMailbox()
        self.executor: Executor = (
            runner
            if isinstance(runner, MultiProcessExecutor)
            else InProcessExecutor(runner, settings.async_depth)
        )
        self.page = shared_page()
        self.core = build_engine(
            settings, self.executor, self.mailbox, self.page, epoch=epoch, load_grammars=load_grammars
        )
        self._numbers = iter(range(1, 1 << 30))

    @property
    def scheduler(self) -> Scheduler:
        return self.core._scheduler

    @property
    def answers(self) -> dict[int, Answer]:
        return self.mailbox.answers

    def send(self, event: Event) -> None:
        self.mailbox.inbox.append((CLIENT, event))

    def add(self, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> int:
        """Queue an Add (sent with the next turn) and return its number."""
        sampling = {k: fields.pop(k) for k in list(fields) if k in SamplingParams.__struct_fields__}
        number = fields.pop("request", None) or next(self._numbers)
        produced = fields.pop("produced", ())
        self.mailbox.produced[number] = len(produced)
        column = pack(prompt)
        salt, adapter = fields.get("cache_salt", ""), fields.get("adapter", "")
        self.send(
            Add(
                request=number,
                prompt=column,
                block_hashes=fields.pop("block_hashes", None)
                or block_hashes(column, self.executor.facts.block_size, salt, adapter),
                produced=pack(produced) if len(produced) else b"",
                sampling=SamplingParams(max_tokens=max_tokens, **sampling),
                seed=fields.pop("seed", number),
                **fields,
            )
        )
        return number

    def abort(self, *numbers: int) -> None:
        self.send(Abort(pack(numbers, NUMBER)))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.iterate()

    def drain(self, limit: int = 100_000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(limit):
            requests = self.scheduler.requests
            quiet = requests.idle and not requests.num_parked()
            if quiet and not self.mailbox.inbox and not self.core._in_flight:
                break
            self.core.iterate()
        else:
            raise AssertionError(f"not idle after {limit} turns")
        self.scheduler.requests.check()

    def assert_empty(self) -> None:
        """All blocks and rows are free."""
        kv = self.scheduler.kv
        assert kv.num_free == kv.pool.num_blocks
        assert len(self.scheduler.requests.rows.free) == self.settings.max_num_seqs
        assert not self.scheduler.requests._requests

    def close(self) -> None:
        self.executor.close()


def simulated_settings(**values: Any) -> Settings:
    """Settings of a small simulated engine with its invariants checked after every step."""
    defaults: dict[str, Any] = {
        "executor": "simulated",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "debug": True,
    }
    return Settings(**(defaults | values))


def simulated(
    *,
    epoch: int = 1,
    groups: int = 1,
    windows: Sequence[int] = (),
    vocab: int = 1000,
    load_grammars: Callable[[], Grammars] | None = None,
    pooling: str = "",
    encoder: bool = False,
    wrap: Callable[[ModelRunner], ModelRunner] = lambda runner: runner,
    **values: Any,
) -> Harness:
    """A harness over the simulated runner: steps take no time, the KV history is verified.

    `groups` full KV groups, and one for each of `windows` (tokens). `pooling`: the kind of vectors it makes.
    `wrap`: makes the engine's runner of the simulated one.
    """
    settings = simulated_settings(**values)
    per_request = -(-settings.max_model_len // settings.block_size)
    facts = RunnerFacts(
        num_blocks=settings.num_gpu_blocks_override
        or settings.max_num_seqs * per_request * (groups + len(windows)),
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        vocab_size=vocab,
        kv_groups=(
            *(KVGroup("full", (g,), settings.block_size * 8) for g in range(groups)),
            *(KVGroup("window", (99,), settings.block_size * 8, window) for window in windows),
        ),
        dtype="none",
        device="none",
        pooling=Pooling(pooling, True, 4) if pooling else None,
        encoder=encoder,
    )
    runner = wrap(SimulatedRunner(facts, settings.max_num_seqs, verify=True))
    return Harness(settings, runner, epoch=epoch, load_grammars=load_grammars)


def prompt(length: int, salt: int = 0) -> list[int]:
    """A prompt of `length` tokens, different for each salt."""
    return np.random.default_rng((salt, length)).integers(0, 1000, length).tolist()
