"""`servelite bench serve`: load on an OpenAI-compatible server that runs, and what its clients see.

The server may be servelite or any other; none is started here. A chat or completion request streams its
answer; the time to its first token, the time between tokens, the time to its end and the throughput of
all are told for each level of load, percentiles by nearest rank over all samples. docs/benchmarking.md
says what each figure means, and how to compare two servers.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from typing import TYPE_CHECKING, Any

from servelite.cli.bench_arguments import OneLineErrors, count, json_object, positive, positive_number
from servelite.cli.bench_output import check_json_path, write_json
from servelite.config import SettingError
from servelite.ipc.process import ExitCode

if TYPE_CHECKING:
    from servelite.bench.prompts import Lengths
    from servelite.bench.serve import ServeOptions

_EXAMPLES = """examples:
  servelite bench serve                                  1, 8 and 32 streams of 128 tokens in, 128 out
  servelite bench serve --chat --concurrency 16 --duration 60 --input-len 50:500 --output-len 20:200
  servelite bench serve --request-rate 2 4 8 --num-requests 200 --json rates.json
  servelite bench serve --prefix-len 1000 --input-len 24 --output-len 32 --concurrency 16 16
                                                         a shared beginning: new to the cache, then in it
  servelite bench serve --concurrency 8 --num-requests 8 --long-prompt 2000
                                                         how long do 8 streams stall for one long prompt?
"""


def add_command(commands: argparse._SubParsersAction[OneLineErrors]) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="load on a server: latency and throughput",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = parser.add_argument_group("the server")
    server.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="where it is, with or without /v1; http only (%(default)s)",
    )
    server.add_argument("--model", help="a name it goes by; not given: the first it lists")
    server.add_argument("--api-key", metavar="KEY", help="sent as `Authorization: Bearer KEY`")
    server.add_argument(
        "--chat", action="store_true", help="/v1/chat/completions; not given: /v1/completions"
    )
    load = parser.add_argument_group("the load")
    level = load.add_mutually_exclusive_group()
    level.add_argument(
        "--concurrency", metavar="N", nargs="+", type=positive, default=None,
        help="streams at once, each sending its next request when its last has ended; several: one level "
        "after the other (default 1 8 32)",
    )  # fmt: skip
    level.add_argument(
        "--request-rate", metavar="R", nargs="+", type=positive_number,
        help="instead: requests a second, at random (Poisson) times, however many are in flight",
    )  # fmt: skip
    amount = load.add_mutually_exclusive_group()
    amount.add_argument(
        "--num-requests", metavar="N", type=positive,
        help="of each level; not given: 4 for each stream and at least 8, at a rate 100",
    )  # fmt: skip
    amount.add_argument(
        "--duration", metavar="S", type=positive_number,
        help="instead: begin requests for S seconds a level, then let those in flight end",
    )  # fmt: skip
    load.add_argument(
        "--warmup", metavar="N", type=count, default=4, help="requests before, not measured (4)"
    )
    load.add_argument("--timeout", metavar="S", type=positive_number, default=600.0,
                      help="seconds after which a request counts as failed (600)")  # fmt: skip
    load.add_argument(
        "--long-prompt", metavar="TOKENS", type=positive,
        help="once all streams of a level have 16 chunks, send one prompt of this length beside them, and "
        "tell how long they stall",
    )  # fmt: skip
    request = parser.add_argument_group("the requests")
    request.add_argument("--input-len", metavar="N", type=_lengths, default="128",
                         help="tokens of a prompt, or LOW:HIGH, drawn evenly (128)")  # fmt: skip
    request.add_argument("--output-len", metavar="N", type=_lengths, default="128",
                         help="tokens of an answer, or LOW:HIGH (128)")  # fmt: skip
    request.add_argument("--prefix-len", metavar="N", type=count, default=0,
                         help="tokens that all prompts begin with, beside --input-len (0)")  # fmt: skip
    request.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="ask for answers of full length with the field ignore_eos, which not every server knows (on)",
    )  # fmt: skip
    request.add_argument(
        "--body", metavar="JSON", type=json_object, default={},
        help="more fields of each request, such as '{\"temperature\": 1}' (default 0); null leaves one out",
    )  # fmt: skip
    request.add_argument(
        "--seed", type=count,
        help="same seed, same prompts: give it to compare servers; not given: a random one, so that no "
        "prompt is in the server's cache from the run before",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file too")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure; the exit code is 1 if any request failed, 130 after an interrupt."""
    from servelite.bench.serve import prepare, run_load
    from servelite.bench.serve_report import LevelReport, level_text, summary_text
    from servelite.bench.target import BenchError

    reports: list[LevelReport] = []

    def tell(report: LevelReport) -> None:
        reports.append(report)
        print(level_text(report), end="\n\n", flush=True)

    try:
        check_json_path(options.json)
        asked = _serve_options(options)
        workload = prepare(asked)
        target = workload.target
        print(
            f"http://{target.authority}{target.path}, model {target.model}: prompts of "
            f"{asked.prompt} tokens{f' after {asked.prefix} shared ones' if asked.prefix else ''}, "
            f"answers of {asked.output}, seed {asked.seed}\n",
            flush=True,
        )
        whole = run_load(asked, workload, tell)
    except (SettingError, BenchError) as error:
        print(f"servelite: {error}", file=sys.stderr)
        return ExitCode.SETTING
    if len(reports) > 1:
        print(summary_text(reports))
    write_json(options.json, "serve", _asked(asked, target.model), whole, [r.to_dict() for r in reports])
    if not whole:
        print("servelite: interrupted: the figures are of what was measured until then", file=sys.stderr)
        return 128 + signal.SIGINT
    if any(report.any_failed for report in reports):
        print("servelite: some requests failed", file=sys.stderr)
        return ExitCode.INTERNAL
    return ExitCode.OK


def _serve_options(options: argparse.Namespace) -> ServeOptions:
    from servelite.bench.load import Amount, Level
    from servelite.bench.serve import ServeOptions

    if options.long_prompt and options.request_rate:
        raise SettingError(
            "--long-prompt waits for all streams to begin: give --concurrency, no --request-rate"
        )
    rates = [Level(rate=rate) for rate in options.request_rate or ()]
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    fields = options.body if options.ignore_eos else {"ignore_eos": None} | options.body
    return ServeOptions(
        url=options.url,
        levels=rates or [Level(streams=streams) for streams in options.concurrency or (1, 8, 32)],
        amount=Amount(options.num_requests or 0, options.duration or 0.0),
        prompt=options.input_len,
        output=options.output_len,
        seed=seed,
        chat=options.chat,
        model=options.model,
        api_key=options.api_key,
        fields=fields,
        prefix=options.prefix_len,
        long_prompt=options.long_prompt or 0,
        warm_up=options.warmup,
        timeout=options.timeout,
    )


def _asked(options: ServeOptions, model: str) -> dict[str, Any]:
    """What was measured, for JSON. The key is nobody's business."""
    return {
        "url": options.url,
        "model": model,
        "chat": options.chat,
        "input_len": str(options.prompt),
        "output_len": str(options.output),
        "prefix_len": options.prefix,
        "long_prompt": options.long_prompt,
        "fields": dict(options.fields),
        "warmup": options.warm_up,
        "seed": options.seed,
        "timeout": options.timeout,
    }


def _lengths(text: str) -> Lengths:
    from servelite.bench.prompts import Lengths

    low, colon, high = text.partition(":")
    lengths = Lengths(positive(low), positive(high if colon else low))
    if lengths.low > lengths.high:
        raise argparse.ArgumentTypeError(f"{text!r}: the lower end is above the higher one")
    return lengths
