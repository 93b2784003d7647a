"""`servelite chat`: a conversation in the terminal, with a model or with a server that runs.

Ctrl-C ends an answer, or at the prompt the program. /clear begins anew, /exit leaves. Lines may be
piped in.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from servelite.config import SettingError, add_flags
from servelite.ipc.process import ExitCode

Messages = list[dict[str, str]]
Speaker = Callable[[Messages], Iterator[str]]
"""From the conversation so far to the answer's pieces."""

_SERVER_ONLY: Final = (
    "model", "host", "port", "served_model_name", "api_key", "max_logprobs", "unknown_fields",
    "max_body_bytes", "timeout_keep_alive", "sse_keep_alive", "drain_delay", "drain_timeout",
    "seed",  # here it is each answer's own
)  # fmt: skip


class ChatFailed(Exception):
    """An answer that did not come; the text says why."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS,
        help="a GGUF file, a folder, or `demo` (default demo); with --url: a name the server goes by",
    )  # fmt: skip
    parser.add_argument("--url", help="talk to the server at this address instead of starting an engine")
    parser.add_argument("--api-key", dest="key", metavar="KEY", help="with --url: what the server asks for")
    parser.add_argument("--system", help="a system message to begin with")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 for the likeliest answer (default 0.7)"
    )
    parser.add_argument("--seed", dest="answer_seed", type=int, help="same seed, same answers")
    parser.add_argument("--max-tokens", type=int, help="longest answer, in tokens")
    add_flags(parser, skip=_SERVER_ONLY)
    parser.set_defaults(run=run, log_level="warning")  # a conversation is no place for news


def run(options: argparse.Namespace) -> int:
    """Talk until the input ends; returns the exit code."""
    sampling = {
        "temperature": options.temperature,
        "seed": options.answer_seed,
        "max_tokens": options.max_tokens,
    }
    try:
        with _speaker(options, sampling) as speak:
            return _talk(speak, options.system)
    except (SettingError, ChatFailed) as error:
        print(f"servelite: {error}", file=sys.stderr)
        return ExitCode.SETTING


@contextlib.contextmanager
def _speaker(options: argparse.Namespace, sampling: dict[str, Any]) -> Iterator[Speaker]:
    if options.url is not None:
        from servelite.cli.chat_http import http_speaker

        yield http_speaker(options.url, getattr(options, "model", None), sampling, options.key)
        return
    from servelite.cli.serve import settings_of
    from servelite.launcher.errors import LaunchError
    from servelite.llm import LLM, EngineFailed

    settings: dict[str, Any] = settings_of(options).to_dict()
    try:
        with LLM(**settings) as llm:

            def speak(messages: Messages) -> Iterator[str]:
                try:
                    yield from llm.stream_chat(messages, **sampling)
                except (ValueError, EngineFailed) as error:
                    raise ChatFailed(str(error)) from None

            yield speak
    except (LaunchError, EngineFailed) as error:
        raise ChatFailed(str(error)) from None


def _talk(speak: Speaker, system: str | None) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives `input` editing and a history)
    opening: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            line = input("> ") if interactive else input()
        except (EOFError, KeyboardInterrupt):
            return ExitCode.OK
        match line.strip():
            case "":
                continue
            case "/exit":
                return ExitCode.OK
            case "/clear":
                messages = list(opening)
                continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _print_answer(speak(messages))})
        except ChatFailed as error:
            messages.pop()
            print(f"servelite: {error}", file=sys.stderr)
            if not interactive:
                return ExitCode.INTERNAL


def _print_answer(pieces: Iterator[str]) -> str:
    """Print the answer as it comes and return it, or what there is of it at Ctrl-C."""
    said = []
    try:
        for piece in pieces:
            said.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
    print(flush=True)
    return "".join(said)
