"""Tokenizer and detokenizer speed on one thread: `python -m benchmarks.tokenizer [MODEL]`.

Prints how long a model's metadata and tokenizer take to open, encoding in tokens a second, a chat
template's cost, and the detokenizer's microseconds a token at one token a push, which is how a stream
is served. Each figure is the best of several rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

from servelite.loader.resolve import resolve_model
from servelite.tokenizer.chat_template import ChatTemplate
from servelite.tokenizer.detokenizer import Detokenizer
from servelite.tokenizer.model_files import ModelFiles, open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer

PARAGRAPH = (
    "The scheduler admits a request when the cache has blocks for its next chunk. Decodes go first, "
    "so that they never wait for a prefill; in 2024, that cost 3.5 ms per step (p99: 12 ms).\n\n"
    "1. Größe, naïveté, 東京, emoji 👩🏿‍⚖️\n"
)


def best(rounds: int, work: Callable[[], object]) -> float:
    """The least time of `work`, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def opening(files: ModelFiles, rounds: int) -> list[tuple[str, str]]:
    return [
        ("open metadata", f"{best(rounds, lambda: open_model_files(files.path)) * 1e3:.1f} ms"),
        ("build tokenizer", f"{best(rounds, lambda: load_tokenizer(files)) * 1e3:.1f} ms"),
    ]


def encoding(tokenizer: Tokenizer, rounds: int, tokens: int) -> list[tuple[str, str]]:
    rows = []
    per_paragraph = len(tokenizer.encode(PARAGRAPH, add_special_tokens=False))
    for name, repeats in (("a short prompt", 1), ("a long prompt", max(1, tokens // per_paragraph))):
        text = PARAGRAPH * repeats
        count = len(tokenizer.encode(text, add_special_tokens=False))
        seconds = best(rounds, partial(tokenizer.encode, text, add_special_tokens=False))
        rows.append((f"encode {name} ({count} tokens)", f"{count / seconds:,.0f} tokens/s"))
    return rows


def templating(files: ModelFiles, tokenizer: Tokenizer, rounds: int) -> list[tuple[str, str]]:
    if files.chat_template is None:
        return []
    template = ChatTemplate(
        files.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.special_tokens,
    )
    plain = [{"role": "user", "content": PARAGRAPH}]
    forged = [{"role": "user", "content": PARAGRAPH + (tokenizer.eos_token or "</s>")}]
    return [
        ("render a chat", f"{best(rounds * 20, lambda: template.render(plain)) * 1e6:.0f} us"),
        (
            "render a chat that spells a control token",
            f"{best(rounds * 20, lambda: template.render(forged)) * 1e6:.0f} us",
        ),
    ]


def detokenizing(tokenizer: Tokenizer, rounds: int, tokens: int) -> list[tuple[str, str]]:
    ids = tokenizer.encode(PARAGRAPH, add_special_tokens=False)
    singles = [[ids[i % len(ids)]] for i in range(tokens)]

    def run(stop: tuple[str, ...]) -> None:
        push = Detokenizer(tokenizer, stop=stop).push
        for single in singles:
            push(single)

    rows = []
    for name, stop in (
        ("no stop strings", ()),
        ("two rare stop strings", ("###", "</answer>")),
        ("a stop string that often begins", ("\n\nUser:", " q", " zz")),
    ):
        micros = best(rounds, partial(run, stop)) / tokens * 1e6
        rows.append((f"detokenize, {name}", f"{micros:.2f} us/token"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="demo", help="a GGUF file, a folder, or `demo`")
    parser.add_argument("--rounds", type=int, default=5, help="the best of so many (default 5)")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens a round (default 50000)")
    options = parser.parse_args()
    files = open_model_files(resolve_model(options.model))
    tokenizer = load_tokenizer(files)
    rows = opening(files, options.rounds)
    rows += encoding(tokenizer, options.rounds, options.tokens)
    rows += templating(files, tokenizer, options.rounds)
    rows += detokenizing(tokenizer, options.rounds, options.tokens)
    width = max(len(name) for name, _ in rows)
    for name, figure in rows:
        print(f"{name:<{width}}  {figure:>18}")


if __name__ == "__main__":
    main()
