"""What a start is made of, part by part: `python -m benchmarks.loading [MODEL]`.

Prints the time of opening a model's metadata, building its tokenizer, importing torch (in a process of
its own), reading all weights in float32 and in bfloat16, and how much anonymous memory they take; for a
GGUF file also the rate of each tensor type. Each figure is the best of several rounds; the file is in the
system's cache from the second on.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from servelite.kernels.dispatch import REFERENCE
from servelite.loader.gguf_dequantize import SUPPORTED, dequantize
from servelite.loader.model import load_model
from servelite.loader.resolve import resolve_model
from servelite.tokenizer.gguf import GGUFFile
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import load_tokenizer


def best(rounds: int, work: Callable[[], object]) -> float:
    """The least time of `work`, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def anonymous_memory() -> int:
    """Of this process, in bytes."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def rates(gguf: GGUFFile, rounds: int) -> list[tuple[str, str]]:
    """Of the largest tensor of each type."""
    largest = {t.type: t for t in sorted(gguf.tensors.values(), key=lambda each: each.nbytes)}
    rows = []
    for kind, tensor in largest.items():
        if kind not in SUPPORTED:
            continue
        raw = np.frombuffer(gguf.data, np.uint8, tensor.nbytes, tensor.offset)
        out = np.empty(int(np.prod(tensor.shape)), np.float32)
        seconds = best(rounds, partial(dequantize, kind, raw, out))
        rows.append((f"dequantise {kind.name}, one thread", f"{out.size / seconds / 1e6:,.0f} M weights/s"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="what `servelite serve` takes")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    files = open_model_files(resolve_model(options.model))
    rounds = options.rounds

    def torch_import() -> None:
        subprocess.run([sys.executable, "-c", "import torch"], check=True)

    rows = [
        ("open metadata", f"{best(rounds, lambda: open_model_files(files.path)):.2f} s"),
        ("build tokenizer", f"{best(rounds, lambda: load_tokenizer(files)):.2f} s"),
        ("import torch, its own process", f"{best(rounds, torch_import):.2f} s"),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        before = anonymous_memory()
        model = load_model(files, REFERENCE, dtype)
        grown = anonymous_memory() - before
        weights = sum(slot.tensor.nbytes for slot in model.weights())
        seconds = best(rounds, partial(load_model, files, REFERENCE, dtype))
        name = str(dtype).removeprefix("torch.")
        rows.append((f"load weights, {name}, {torch.get_num_threads()} threads", f"{seconds:.2f} s"))
        rows.append((f"memory, {name}", f"{grown / 1e6:,.0f} MB for {weights / 1e6:,.0f} MB of weights"))
        del model
    if files.gguf is not None:
        rows += rates(files.gguf, rounds)
    for name, figure in rows:
        print(f"{name:40} {figure:>28}")


if __name__ == "__main__":
    main()
