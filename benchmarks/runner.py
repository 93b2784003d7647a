"""Times of a step through the real model runner: prepare, forward, sample, in milliseconds.

    python -m benchmarks.runner --batch 1 8 32 --prompt 64 --steps 32
    python -m benchmarks.runner --sampling '{"temperature": 1, "presence_penalty": 0.5, "logprobs": 5}'

Medians over decode steps after one prefill step; no scheduler, no processes. Set OMP_NUM_THREADS and
GOMP_SPINCOUNT=5000 as the launcher would.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import numpy.typing as npt

from servelite.config import Settings
from servelite.ipc.messages import NewRow, Plan, SamplingParams, pack
from servelite.loader.resolve import resolve_model
from servelite.worker.base import ModelRunner
from servelite.worker.load import load_runner


def plans(runner: ModelRunner, batch: int, prompt: int, steps: int, sampling: SamplingParams) -> list[Plan]:
    """A prefill of `batch` random prompts, then `steps` decodes of all, each on blocks of its own."""
    size = runner.facts.block_size
    per_row = -(-(prompt + steps) // size)
    random = np.random.default_rng(0)
    out, held = [], 0
    for step in range(steps + 1):
        count = prompt if step == 0 else 1
        needed = -(-(prompt + step) // size)
        blocks = [row * per_row + i for row in range(batch) for i in range(held, needed)]
        new = [
            NewRow(
                row=row,
                generation=0,
                tokens=pack(random.integers(0, runner.facts.vocab_size, prompt)),
                prompt_len=prompt,
                num_computed=0,
                seed=row,
                choice=0,
                sampling=sampling,
            )
            for row in range(batch if step == 0 else 0)
        ]
        out.append(
            Plan(
                epoch=0,
                step=step,
                rows=pack(range(batch)),
                generations=pack([0] * batch),
                num_tokens=pack([count] * batch),
                num_drafts=b"",
                num_logits=pack([1] * batch),
                block_counts=pack([needed - held] * batch),
                block_ids=pack(blocks),
                new_rows=tuple(new),
            )
        )
        held = needed
    return out


def measure(runner: ModelRunner, steps: list[Plan]) -> npt.NDArray[np.float64]:
    """[steps, 3] seconds of prepare, forward, sample."""
    seconds = []
    for plan in steps:
        runner.forward(plan)
        seconds.append(runner.sample(plan, None).seconds)
    return np.array(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--steps", type=int, default=32, help="decode steps to time")
    parser.add_argument(
        "--sampling", type=json.loads, default={"temperature": 0}, help="fields of SamplingParams, as JSON"
    )
    given = parser.parse_args()
    sampling = SamplingParams(max_tokens=given.steps, **given.sampling)
    length = given.prompt + given.steps + 1  # the prefill samples one too
    print(f"{'batch':>5} {'prefill':>9} {'prepare':>9} {'forward':>9} {'sample':>9} {'tokens/s':>9}")
    for batch in given.batch:
        settings = Settings(max_num_seqs=batch, max_model_len=length)
        runner = load_runner(settings, resolve_model(given.model))
        seconds = measure(runner, plans(runner, batch, given.prompt, given.steps, sampling))
        prefill, decode = seconds[0].sum() * 1e3, np.median(seconds[1:], axis=0) * 1e3
        columns = [prefill, *decode, batch / decode.sum() * 1e3]
        print(f"{batch:>5} " + " ".join(f"{value:9.2f}" for value in columns))


if __name__ == "__main__":
    main()
