"""What structured output costs: compiling, masks, and a step of which one row follows a grammar.

    GOMP_SPINCOUNT=5000 python -m benchmarks.structured
    GOMP_SPINCOUNT=5000 python -m benchmarks.structured --batch 32 --steps 100

The vocabulary is the demo model's, and so is the model of the last part: steps of a batch in which no row,
one row and every row is bound, in alternating rounds; medians, and their ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from servelite.config import Settings
from servelite.ipc.masks import pack_masks, unpack_bits
from servelite.ipc.messages import NewRow, Plan, SamplingParams, pack
from servelite.loader.resolve import resolve_model
from servelite.tokenizer.grammar import Grammars, Matcher
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer
from servelite.worker.load import load_runner

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "score": {"type": "number"},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "score", "active"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema of 5 properties": grammar_text(GrammarKind.JSON_SCHEMA, SCHEMA),
    "schema of 500 properties": grammar_text(
        GrammarKind.JSON_SCHEMA,
        {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(500)}},
    ),
    "json_object": grammar_text(GrammarKind.JSON_OBJECT),
    "regex": grammar_text(GrammarKind.REGEX, "[A-Z][a-z]+( [A-Z][a-z]+)*, [0-9]{1,3} years"),
    "choice of 100": grammar_text(GrammarKind.CHOICE, [f"choice number {i}" for i in range(100)]),
}


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def walk(first: Matcher, words: np.ndarray, end: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of masks and of accepted tokens, of answers that a blind writer makes."""
    rng, matcher = random.Random(0), first.copy()
    fills: list[float] = []
    accepts: list[float] = []
    while len(fills) < count:
        current = matcher
        fills.append(seconds(lambda: current.fill(words)))  # noqa: B023
        allowed = np.flatnonzero(unpack_bits(words.view(np.uint8)[None], len(words) * 32)[0])
        token = int(rng.choice(allowed))
        if token == end:
            matcher = first.copy()
            continue
        accepts.append(seconds(lambda: current.accept([token])))  # noqa: B023
    return fills, accepts


def measure_grammars(tokenizer: Tokenizer, count: int) -> None:
    """Print what compiling and masks take."""
    made: list[Grammars] = []
    print(f"vocabulary of {tokenizer.vocab_size}: {seconds(lambda: made.append(Grammars(tokenizer))):.2f} s")
    grammars, words = made[0], np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    for name, text in GRAMMARS.items():
        compiles = [seconds(lambda: grammars.compile(text)) for _ in range(15)]  # noqa: B023
        fills, accepts = walk(grammars.compile(text), words, tokenizer.eos_token_ids[0], count)
        fills.sort()
        print(
            f"{name:26} compile {statistics.median(compiles) * 1e3:7.2f} ms   mask "
            f"{statistics.median(fills) * 1e6:6.1f} us, 99 % {fills[len(fills) * 99 // 100] * 1e6:7.1f} us   "
            f"accept {statistics.median(accepts) * 1e6:5.1f} us"
        )


class Steps:
    """Decode steps of one batch on the real model, some of whose rows are masked."""

    def __init__(self, batch: int, context: int, steps: int) -> None:
        blocks = -(-(context + steps + 2) // 16)
        settings = Settings(
            max_num_seqs=batch, num_gpu_blocks_override=batch * blocks, max_model_len=blocks * 16
        )
        self.runner = load_runner(settings, resolve_model("demo"))
        self.rows, self.blocks, self.step = np.arange(batch, dtype=np.int32), blocks, 0
        self._run(context, first=True)

    def _run(self, tokens: int, masks: bytes | None = None, *, first: bool = False) -> None:
        batch, nothing = len(self.rows), np.zeros(0, np.int32)
        new = tuple(
            NewRow(
                row,
                1,
                pack(range(5, 5 + tokens)),
                tokens,
                0,
                row,
                0,
                SamplingParams(1 << 20, temperature=0.0),
            )
            for row in (self.rows.tolist() if first else ())
        )
        self.step += 1
        plan = Plan(
            epoch=1,
            step=self.step,
            rows=pack(self.rows),
            generations=pack(np.ones(batch)),
            num_tokens=pack(np.full(batch, tokens)),
            num_drafts=b"",
            num_logits=pack(np.ones(batch)),
            block_counts=pack(np.full(batch, self.blocks if first else 0)),
            block_ids=pack(np.arange(batch * self.blocks) if first else nothing),
            new_rows=new,
            needs_masks=masks is not None,
        )
        self.runner.forward(plan)
        self.runner.sample(plan, masks)

    def time(self, matchers: list[Matcher]) -> float:
        """Seconds of a step whose first rows follow `matchers`, their masks included."""

        def work() -> None:
            masks = None
            if matchers:
                words = np.zeros((len(matchers), -(-self.runner.facts.vocab_size // 32)), np.uint32)
                for matcher, line in zip(matchers, words, strict=True):
                    matcher.fill(line)
                masks = pack_masks(self.rows[: len(matchers)], words)
            self._run(1, masks)

        return seconds(work)


def measure_steps(tokenizer: Tokenizer, batch: int, context: int, steps: int) -> None:
    """Print what a step takes with no row, one row and every row bound."""
    matcher = Grammars(tokenizer).compile(GRAMMARS["schema of 5 properties"])
    matcher.accept(tokenizer.encode('{"name":"', add_special_tokens=False))  # in a string: a wide mask
    counts = (0, 1, batch)
    bench = Steps(batch, context, steps * len(counts))
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(steps):
        for count in counts:
            times[count].append(bench.time([matcher.copy() for _ in range(count)]))
    plain = statistics.median(times[0])
    for count in counts:
        median, spread = statistics.median(times[count]), statistics.quantiles(times[count], n=10)
        print(
            f"step of {batch} rows, {count:3} bound: {median * 1e3:7.2f} ms (ratio {median / plain:.3f}; "
            f"10 to 90 %: {spread[0] * 1e3:.2f} to {spread[-1] * 1e3:.2f})"
        )


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--masks", type=int, default=2000, help="masks a grammar")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=32, help="tokens in the cache of each row")
    parser.add_argument("--steps", type=int, default=20, help="steps of each kind")
    chosen = parser.parse_args()
    tokenizer = load_tokenizer(open_model_files(resolve_model("demo")))
    measure_grammars(tokenizer, chosen.masks)
    measure_steps(tokenizer, chosen.batch, chosen.context, chosen.steps)


if __name__ == "__main__":
    main()
