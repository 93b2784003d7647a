"""A long random walk of the engine on the simulated runner: `python -m tests.engine.soak --steps 10000000`.

Arrivals with shared prefixes, aborts in every state, shortages, rows that are not finite, failed
steps, deadlines, windows, both policies, depth 1 to 3. After every step all books are checked; every
answer is the one its request gets alone; under `fcfs` each request ends within a bound; at the end of
each episode all blocks are free.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from functools import lru_cache
from typing import Any

import msgspec

from servelite.engine.policies import POLICIES
from servelite.ipc.messages import FLAG, FinishReason, Plan, RowFlag, StepResult, pack, unpack
from servelite.worker.base import StepFailedError
from tests.engine_harness import CLIENT, Harness, prompt, simulated

MAX_LEN = 64
MAX_TOKENS = 30


@lru_cache(maxsize=10_000)
def alone(length: int, salt: int, windows: tuple[int, ...]) -> tuple[int, ...]:
    """The longest answer of a request that has the engine for itself."""
    harness = simulated(windows=windows, max_num_seqs=1)
    number = harness.add(prompt(MAX_LEN, salt)[:length], max_tokens=MAX_TOKENS, seed=5)
    harness.drain()
    harness.close()
    return tuple(harness.answers[number].tokens)


class Faults:
    """Makes steps fail and rows not finite, at random."""

    def __init__(self, harness: Harness, rng: random.Random, rate: float) -> None:
        self.rng, self.rate = rng, rate
        runner: Any = harness.executor._runner
        self._forward, self._sample = runner.forward, runner.sample
        runner.forward, runner.sample = self.forward, self.sample

    def forward(self, plan: Plan) -> None:
        self._forward(plan)  # written or not: what a failed step leaves is void
        if self.rng.random() < self.rate:
            raise StepFailedError("a fault of the test's")

    def sample(self, plan: Plan, masks: bytes | None) -> StepResult:
        result = self._sample(plan, masks)
        rows = unpack(result.rows)
        if len(rows) and self.rng.random() < self.rate:
            flags = [RowFlag.OK] * len(rows)
            flags[self.rng.randrange(len(rows))] = RowFlag.NON_FINITE
            return msgspec.structs.replace(result, flags=pack(flags, FLAG))
        return result


class Episode:
    """One engine, some dozens of requests, then silence."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.windows: tuple[int, ...] = rng.choice([(), (), (6,), (17,)])
        self.policy = rng.choice(["fcfs", *sorted(POLICIES)])
        self.depth = rng.choice([1, 2, 3])
        self.blocks = rng.randint(24, 60) * (1 + len(self.windows))
        self.budget = rng.choice([8, 16, 64])
        self.faulty = rng.random() < 0.3
        self.harness = simulated(
            windows=self.windows,
            async_depth=self.depth,
            num_gpu_blocks_override=self.blocks,
            max_num_batched_tokens=self.budget,
            scheduling_policy=self.policy,
            max_model_len=128,
        )
        if self.faulty:
            Faults(self.harness, rng, 0.02)
        self.asked: dict[int, tuple[int, int, int]] = {}
        self.aborted: set[int] = set()
        self.bounds: dict[int, int] = {}  # turn by which a request has ended
        self.turns = 0

    def run(self) -> int:
        """Returns the steps that ran."""
        arrivals = self.rng.randint(5, 40)
        while arrivals or not self._over():
            if arrivals and self.rng.random() < 0.3:
                arrivals -= 1
                self._arrive()
            if self.asked and self.rng.random() < 0.04:
                number = self.rng.choice(list(self.asked))
                self.aborted.add(number)
                self.harness.abort(number)
            self._turn()
        self.harness.scheduler.requests.check()
        self.harness.assert_empty()
        self._compare()
        self.harness.close()
        return self.harness.scheduler.requests.totals.steps

    def _over(self) -> bool:
        harness = self.harness
        return harness.scheduler.requests.idle and not harness.core._in_flight and not harness.mailbox.inbox

    def _turn(self) -> None:
        self.turns += 1
        self.harness.turn()
        if self.policy == "fcfs" and not self.faulty:
            late = [n for n, bound in self.bounds.items() if self.turns > bound and self._open(n)]
            assert not late, f"requests {late} did not end within their bound"

    def _open(self, number: int) -> bool:
        return self.harness.scheduler.requests.find((CLIENT, number)) is not None

    def _arrive(self) -> None:
        rng = self.rng
        length, salt, max_tokens = rng.randint(1, 60), rng.randint(0, 2), rng.randint(1, MAX_TOKENS)
        fields: dict[str, Any] = {"priority": salt}
        if rng.random() < 0.1 and self.asked:
            fields["prefix_of"] = rng.choice(list(self.asked))
        number = self.harness.add(prompt(MAX_LEN, salt)[:length], max_tokens=max_tokens, seed=5, **fields)
        self.asked[number] = (length, salt, max_tokens)
        self.bounds[number] = self.turns + self._bound(number)

    def _bound(self, number: int) -> int:
        """Turns within which a request ends under fcfs: the first-ranked request moves in every turn
        but for those that wait for steps in flight, so the queue ahead is served one after another
        at the worst."""
        ahead = [asked for n, asked in self.asked.items() if n == number or self._open(n)]
        per_turn = max(1, self.budget // 2 - 8)  # a prefill's least share beside seven decodes
        prefills = sum(-(-(length + answer) // per_turn) for length, _, answer in ahead)
        decodes = sum(answer for _, _, answer in ahead)
        return (self.depth + 1) * (prefills + decodes + 2 * len(ahead) + 2)

    def _compare(self) -> None:
        for number, (length, salt, max_tokens) in self.asked.items():
            expected = alone(length, salt, self.windows)[:max_tokens]
            answer = self.harness.answers.get(number)
            got = tuple(answer.tokens) if answer else ()
            if answer is None or answer.finish is FinishReason.NONE:
                assert number in self.aborted, f"request {number} has no end"
            elif answer.error is not None:
                assert self.faulty, answer.error
            else:
                assert len(got) == len(expected)
            assert got == expected[: len(got)], f"request {number} got other tokens"


def walk(steps: int, seed: int = 0, report: float = 30.0) -> tuple[int, int]:
    """Run episodes until `steps` steps have run; returns (steps, episodes)."""
    done = episodes = 0
    told = time.monotonic()
    while done < steps:
        episode = (seed << 32) + episodes  # no two seeds share one
        try:
            done += Episode(episode).run()
        except BaseException:
            print(f"episode {episode} failed", flush=True)
            raise
        episodes += 1
        if time.monotonic() - told > report:
            told = time.monotonic()
            print(f"{done} steps, {episodes} episodes", flush=True)
    return done, episodes


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)  # failed steps are told of, and there are many
    ran, played = walk(arguments.steps, arguments.seed)
    print(f"{ran} steps, {played} episodes")
