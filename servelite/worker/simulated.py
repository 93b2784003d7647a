"""A model runner without a model: the time of a step by a cost model, tokens by a hash or a script.

It keeps a simulated KV cache: the slot of each position holds a hash of all tokens up to it, and a
sampled token is drawn from the hash found through the row's block table, as is a prompt's vector. So a
token depends on everything a real model's would (prompt, output so far, seed, position) and on nothing
else, and a scheduler or KV manager that gives a row a wrong block yields other tokens.
"""

from __future__ import annotations

import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from servelite.config import SettingError, Settings
from servelite.ipc.masks import unpack_bits, unpack_masks
from servelite.ipc.messages import (
    FLAG,
    KVGroup,
    NewRow,
    Plan,
    Pooling,
    RunnerFacts,
    SamplingParams,
    StepResult,
    pack,
    unpack,
)
from servelite.kernels.collective import ONE_RANK, Collective
from servelite.tokenizer.model_files import ModelFiles, open_model_files, with_tokenizer
from servelite.tokenizer.pooling import read_pooling
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer
from servelite.worker.base import StepGapError
from servelite.worker.kv_pool_size import size_pool

_MAX_BLOCKS: Final = 1 << 16
_BEAT_S: Final = 0.25  # between signs of life in a long step
_BLOCK_BYTES: Final = 128  # as good as any
_Ints = npt.NDArray[np.int32]
_Longs = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step. The defaults are the roofline of an 8B model in bf16 on one H100: 16 GB of
    weights at 3.35 TB/s, 16 GFLOP a token at half of 989 TFLOPS, 128 KiB of KV a context token."""

    base: float = 4.8e-3
    per_token: float = 32e-6
    per_context_token: float = 0.04e-6

    def seconds(self, tokens: int, context_tokens: int) -> float:
        """The time of a step that computes `tokens` and reads `context_tokens` of KV."""
        return self.base + self.per_token * tokens + self.per_context_token * context_tokens


@dataclass(frozen=True)
class Script:
    """Answers by prompt, in tokens. An answer ends with the model's end token."""

    answers: Mapping[str, tuple[int, ...]]
    decode: Callable[[npt.NDArray[np.int32]], str]
    end_token: int

    def answer_to(self, prompt: npt.NDArray[np.int32]) -> tuple[int, ...]:
        """The tokens to give, or () where the script has no answer.

        A script's prompt that is the whole prompt wins; else of those found in the rendered prompt
        the one that stands last (of these the longest), which is the latest message's.
        """
        text = self.decode(prompt)
        if text in self.answers:
            return (*self.answers[text], self.end_token)
        found = [(text.rfind(key) + len(key), len(key), key) for key in self.answers if key in text]
        return (*self.answers[max(found)[2]], self.end_token) if found else ()


def load_script(path: str, tokenizer: Tokenizer) -> Script:
    """Read JSON lines {"prompt": ..., "text": ...}.

    Raises:
        SettingError: the file cannot be read, or a line is not such an object; names the line.
    """
    answers: dict[str, tuple[int, ...]] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--simulated-script {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt, text = entry["prompt"], entry["text"]
            answers[prompt] = tuple(tokenizer.encode(text, add_special_tokens=False))
        except (ValueError, KeyError, TypeError):
            raise SettingError(
                f'--simulated-script {path}, line {number}: not an object {{"prompt": ..., "text": ...}}'
            ) from None
    if not tokenizer.eos_token_ids:
        raise SettingError(f"--simulated-script {path}: the tokenizer has no end token")
    return Script(
        answers,
        lambda ids: tokenizer.decode(ids.tolist(), skip_special_tokens=False),
        tokenizer.eos_token_ids[0],
    )


def simulated_facts(
    settings: Settings,
    vocab_size: int,
    model_max_len: int,
    group: Collective = ONE_RANK,
    pooling: Pooling | None = None,
) -> RunnerFacts:
    """Facts of a simulated model of any length; no memory bounds its pool but `_MAX_BLOCKS`.

    Raises:
        SettingError: the length asked for does not fit the blocks asked for.
    """
    longest = max(settings.max_model_len, model_max_len)
    per_request = -(-(settings.max_model_len or model_max_len) // settings.block_size)
    most = min(settings.max_num_seqs * per_request, max(per_request, _MAX_BLOCKS))
    blocks = settings.num_gpu_blocks_override or most
    # size_pool takes the length that was asked for to be within the model's, which here has none.
    override = dataclasses.replace(settings, num_gpu_blocks_override=blocks)
    size = size_pool(override, longest, _BLOCK_BYTES, 0, group=group)
    return RunnerFacts(
        num_blocks=size.num_blocks,
        block_size=settings.block_size,
        max_model_len=size.max_model_len,
        vocab_size=vocab_size,
        kv_groups=(KVGroup("full", (0,), _BLOCK_BYTES),),
        dtype="none",
        device="none",
        pooling=pooling,
    )


def _mix(x: _U64) -> _U64:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): uint64 in, uint64 out, any shape."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SimulatedRunner:
    """See the module's text. Fulfils `worker.base.ModelRunner`."""

    def __init__(
        self,
        facts: RunnerFacts,
        max_num_seqs: int,
        *,
        cost: CostModel | None = None,
        script: Script | None = None,
        verify: bool = False,
        group: Collective = ONE_RANK,
    ) -> None:
        """
        Args:
            cost: None for steps that take no time.
            verify: check a row's whole KV history at each of its steps (O(length); tests).
            group: ranks that wait for each other once a step; each simulates the whole model.
        """
        self.facts, self._cost, self._script, self._verify = facts, cost, script, verify
        self._group = group
        groups, blocks = len(facts.kv_groups), -(-facts.max_model_len // facts.block_size)
        self._tokens = np.zeros((max_num_seqs, facts.max_model_len + 1), dtype=np.int32)
        self._computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._known = np.zeros(max_num_seqs, dtype=np.int64)  # tokens in the table
        self._generation = np.zeros(max_num_seqs, dtype=np.int32)
        self._prompt_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._key = np.zeros(max_num_seqs, dtype=np.uint64)  # of seed and choice; 0 for greedy
        self._answers: list[tuple[int, ...]] = [()] * max_num_seqs
        self._sampling = [SamplingParams(max_tokens=1)] * max_num_seqs
        self._pools = np.zeros(max_num_seqs, dtype=np.bool_)
        self._tables = np.zeros((groups, max_num_seqs, blocks), dtype=np.int32)
        self._counts = np.zeros((groups, max_num_seqs), dtype=np.int64)
        self._kv = np.zeros(facts.num_blocks * facts.block_size, dtype=np.uint64)
        self._step: int | None = None
        self._busy_until = 0.0
        self._beat: Callable[[], None] = lambda: None
        self._seconds = 0.0

    @classmethod
    def from_settings(
        cls, settings: Settings, model_path: Path, group: Collective = ONE_RANK
    ) -> SimulatedRunner:
        """A runner with the tokenizer and length of the model at `model_path`, none of its weights."""
        files: ModelFiles = open_model_files(model_path)
        if settings.tokenizer:
            files = with_tokenizer(files, Path(settings.tokenizer))
        tokenizer = load_tokenizer(files)
        script = load_script(settings.simulated_script, tokenizer) if settings.simulated_script else None
        fixed = settings.simulated_step_ms
        cost = CostModel() if fixed is None else CostModel(fixed / 1000, 0.0, 0.0)
        kind, normalize = read_pooling(model_path, settings.pooling, encoder=False)
        pooling = Pooling(kind, normalize, files.config.get("hidden_size", 64))
        facts = simulated_facts(settings, tokenizer.vocab_size, files.max_model_len, group, pooling)
        return cls(facts, settings.max_num_seqs, cost=cost, script=script, group=group)

    def watch(self, beat: Callable[[], None]) -> None:
        self._beat = beat

    def forward(self, plan: Plan) -> None:
        if self._step is not None and plan.step != self._step + 1:
            raise StepGapError(f"step {plan.step} came after step {self._step}")
        self._step = plan.step
        self._group.barrier()
        for new in plan.new_rows:
            self._seat(new)
        rows, counts = unpack(plan.rows), unpack(plan.num_tokens).astype(np.int64)
        self._append_blocks(plan, rows)
        self._copy_blocks(plan)
        start = self._computed[rows]
        row_of = np.repeat(rows, counts)
        ends = np.cumsum(counts)
        positions = np.arange(len(row_of)) - np.repeat(ends - counts, counts) + np.repeat(start, counts)
        for group in range(len(self._tables)):
            self._write(group, row_of, positions, start, counts, ends)
        self._computed[rows] += counts
        if self._verify:
            for row, begin in zip(rows.tolist(), start.tolist(), strict=True):
                self._check_row(row, begin)
        if self._cost is not None:
            self._seconds = self._cost.seconds(len(row_of), int(self._computed[rows].sum()))

    def sample(self, plan: Plan, masks: bytes | None) -> StepResult:
        planned = unpack(plan.rows)
        asked = planned[unpack(plan.num_logits) > 0]
        complete = self._computed[asked] == self._known[asked]
        counts = complete & ~self._pools[asked]
        rows = asked[counts]
        length = self._computed[rows]
        drawn = self._draw(rows, length)
        tokens = (drawn % np.uint64(self.facts.vocab_size)).astype(np.int32)
        allowed = {} if masks is None else self._allowed(masks)
        for at, row in enumerate(rows.tolist()):
            index = int(length[at] - self._prompt_len[row])
            if row in allowed and len(ids := allowed[row]):
                tokens[at] = ids[int(drawn[at]) % len(ids)]
            # A script's token gives way to a grammar that does not allow it.
            answer = self._answers[row]
            if index < len(answer) and (row not in allowed or answer[index] in allowed[row]):
                tokens[at] = answer[index]
            sampling = self._sampling[row]
            while index < sampling.min_tokens and tokens[at] in sampling.stop_token_ids:
                tokens[at] = (tokens[at] + 1) % self.facts.vocab_size
        self._tokens[rows, length] = tokens
        self._known[rows] += 1
        self._wait()
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            rows=pack(asked),
            generations=pack(self._generation[asked]),
            counts=pack(counts),
            tokens=pack(tokens),
            flags=pack(np.zeros(len(asked)), FLAG),
            seconds=(0.0, self._seconds, 0.0),
            checksum=zlib.crc32(pack(tokens)),
            vectors=self._vectors(asked[complete & ~counts]),
        )

    def _seat(self, new: NewRow) -> None:
        row, tokens = new.row, unpack(new.tokens)
        self._tokens[row, : len(tokens)] = tokens
        self._known[row], self._computed[row] = len(tokens), new.num_computed
        self._generation[row], self._prompt_len[row] = new.generation, new.prompt_len
        self._counts[:, row] = 0
        key = _mix(_mix(np.array([new.seed], dtype=np.uint64) + np.uint64(1)) + np.uint64(new.choice + 1))
        self._key[row] = key[0] if new.sampling.temperature > 0 else 0
        self._sampling[row], self._pools[row] = new.sampling, new.pools
        self._answers[row] = self._script.answer_to(tokens[: new.prompt_len]) if self._script else ()

    def _append_blocks(self, plan: Plan, rows: npt.NDArray[np.int32]) -> None:
        counts = unpack(plan.block_counts).reshape(len(self._tables), len(rows))
        blocks, at = unpack(plan.block_ids), 0
        for group, position in np.argwhere(counts):
            row, count = rows[position], counts[group, position]
            held = self._counts[group, row]
            self._tables[group, row, held : held + count] = blocks[at : at + count]
            self._counts[group, row] += count
            at += int(count)

    def _copy_blocks(self, plan: Plan) -> None:
        slots = self._kv.reshape(-1, self.facts.block_size)
        for source, destination in unpack(plan.copies).reshape(-1, 2).tolist():
            slots[destination] = slots[source]

    def _slots(self, group: int, rows: npt.NDArray, positions: npt.NDArray) -> npt.NDArray[np.int64]:
        size = self.facts.block_size
        return self._tables[group, rows, positions // size].astype(np.int64) * size + positions % size

    def _terms(self, group: int, rows: npt.NDArray, positions: npt.NDArray) -> _U64:
        """What each token adds to the running hash of its row."""
        weight = _mix(positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(group + 1))
        return (self._tokens[rows, positions].astype(np.uint64) + np.uint64(1)) * weight

    def _write(
        self, group: int, rows: _Ints, positions: _Longs, start: _Longs, counts: _Longs, ends: _Longs
    ) -> None:
        """Fill the KV slots of all positions: the hash before each row's first one, plus a running sum."""
        first_rows = rows[ends - counts]
        before = np.where(
            start > 0, self._kv[self._slots(group, first_rows, np.maximum(start - 1, 0))], np.uint64(0)
        )
        terms = self._terms(group, rows, positions)
        running = np.cumsum(terms, dtype=np.uint64)
        base = running[ends - counts] - terms[ends - counts]
        self._kv[self._slots(group, rows, positions)] = running + np.repeat(before - base, counts)

    def _draw(self, rows: npt.NDArray[np.int32], length: npt.NDArray[np.int64]) -> _U64:
        seen = np.zeros(len(rows), dtype=np.uint64)
        for group in range(len(self._tables)):
            seen = _mix(seen ^ self._kv[self._slots(group, rows, length - 1)])
        return _mix(seen ^ self._key[rows])

    def _vectors(self, rows: npt.NDArray[np.int32]) -> dict[int, bytes]:
        """A vector for each prompt, of numbers from -1 to 1."""
        if not len(rows):
            return {}
        assert self.facts.pooling is not None
        drawn = self._draw(rows, self._computed[rows])[:, None]
        places: _U64 = np.arange(self.facts.pooling.size, dtype=np.uint64)
        mixed = _mix(drawn + places)
        values = mixed.astype(np.int64).astype("<f4") / np.float32(1 << 63)
        return {row: values[at].tobytes() for at, row in enumerate(rows.tolist())}

    def _allowed(self, masks: bytes) -> dict[int, npt.NDArray[np.int64]]:
        """The tokens that each masked row may take."""
        rows, packed = unpack_masks(masks)
        bits = unpack_bits(packed, self.facts.vocab_size)
        return {row: np.flatnonzero(bits[at]) for at, row in enumerate(rows.tolist())}

    def _wait(self) -> None:
        """Steps follow one another; each takes its time from when the one before ended."""
        if self._cost is not None:
            self._busy_until = max(time.monotonic(), self._busy_until) + self._seconds
            while (left := self._busy_until - time.monotonic()) > 0:
                time.sleep(min(left, _BEAT_S))
                self._beat()

    def _check_row(self, row: int, start: int) -> None:
        """All that the row's tokens from `start` on can see is what was computed for them."""
        positions = np.arange(self._computed[row])
        rows = np.full(len(positions), row)
        for group, spec in enumerate(self.facts.kv_groups):
            expected = np.cumsum(self._terms(group, rows, positions), dtype=np.uint64)
            seen = positions >= start - spec.window + 1 if spec.window else positions >= 0
            if not np.array_equal(self._kv[self._slots(group, rows, positions)][seen], expected[seen]):
                raise AssertionError(f"row {row}: the KV cache does not hold what the row computed")
