"""`servelite bench engine`: where a decode step's time goes, component by component, by batch size.

First the engine's loop over the simulated executor: schedule, update (the result taken in, the message
to the front end put together), encode (that message in msgpack) and, apart from their sum, plan (the
plan in msgpack, which only worker processes of their own need), in microseconds. Then the model runner
on the CPU: prepare, forward, sample, in milliseconds. Medians of steps in which all rows decode.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from servelite.cli.bench_arguments import OneLineErrors, json_object, positive
from servelite.cli.bench_output import check_json_path, write_json
from servelite.config import SettingError, Settings, add_flags, settings_from
from servelite.ipc.process import ExitCode, child_environment

if TYPE_CHECKING:
    from servelite.ipc.messages import SamplingParams

_BATCHES: Final = (1, 8, 32, 128, 256)
_SETTINGS: Final = ("executor", "dtype", "block_size", "kv_cache_memory_bytes")


def add_command(commands: argparse._SubParsersAction[OneLineErrors]) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "engine",
        help="a decode step's time by component",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="demo",
        help="what the model runner is measured with (default demo); with --executor simulated none is",
    )  # fmt: skip
    parser.add_argument("--batch", metavar="N", nargs="+", type=positive, default=list(_BATCHES),
                        help="rows that decode at once (1 8 32 128 256)")  # fmt: skip
    parser.add_argument("--context", metavar="N", type=positive, default=128,
                        help="tokens of each row before its first decode (128)")  # fmt: skip
    parser.add_argument(
        "--steps", metavar="N", type=positive, default=32,
        help="decode steps of the runner to time; of the loop ten times as many (32)",
    )  # fmt: skip
    parser.add_argument(
        "--sampling", metavar="JSON", type=json_object, default={"temperature": 0},
        help='of all rows, as fields of SamplingParams, such as \'{"temperature": 1, "top_p": 0.9, '
        "\"logprobs\": 5}' (greedy)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file too")
    skip = tuple(f.name for f in dataclasses.fields(Settings) if f.name not in _SETTINGS)
    add_flags(parser, skip=skip)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure; returns the exit code, 130 after an interrupt."""
    results: list[dict[str, Any]] = []
    whole = True
    try:
        check_json_path(options.json)
        given = {name: getattr(options, name) for name in _SETTINGS if hasattr(options, name)}
        settings = settings_from(
            given
            | {"model": options.model, "max_num_seqs": max(options.batch)}
            | {"max_num_batched_tokens": max(512, *options.batch)}
            | {"max_model_len": options.context + options.steps + 2}
        )
        sampling = _sampling(options)
        path = None if settings.executor == "simulated" else _model_path(options, settings)
        try:
            _loop(options, settings, results)
            if path is not None:
                _runner(options, settings, path, sampling, results)
        except KeyboardInterrupt:
            whole = False
        asked = {"model": options.model, "context": options.context, "steps": options.steps}
        write_json(options.json, "engine", asked | {"sampling": options.sampling}, whole, results)
    except SettingError as error:
        print(f"servelite: {error}", file=sys.stderr)
        return ExitCode.SETTING
    except _Failed as error:
        print(f"servelite: {error}", file=sys.stderr)
        return error.exit_code
    if not whole:
        print("servelite: interrupted: the figures are of what was measured until then", file=sys.stderr)
        return 128 + signal.SIGINT
    return ExitCode.OK


class _Failed(Exception):
    """The model cannot be had, or a step failed; one line, and the exit code of its class."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def _sampling(options: argparse.Namespace) -> SamplingParams:
    import msgspec

    from servelite.ipc.messages import SamplingParams

    values = msgspec.structs.asdict(SamplingParams(max_tokens=options.steps + 2))
    if unknown := sorted(set(options.sampling) - set(values)):
        raise SettingError(f"--sampling: {unknown[0]!r} is none of {', '.join(values)}")
    try:
        return msgspec.convert(list((values | options.sampling).values()), SamplingParams)
    except msgspec.ValidationError as error:
        raise SettingError(f"--sampling: {error}") from None


def _model_path(options: argparse.Namespace, settings: Settings) -> Path:
    """Where the model is, its metadata read: what is wrong is told before anything is measured."""
    from servelite.loader.resolve import ModelNotFound, resolve_model
    from servelite.tokenizer.model_files import ModelFileError, open_model_files

    try:
        path = resolve_model(options.model)
        longest = open_model_files(path).max_model_len
    except (ModelNotFound, ModelFileError) as error:
        raise _Failed(str(error), ExitCode.MODEL) from None
    if settings.max_model_len > longest:
        raise SettingError(
            f"--context {options.context} and --steps {options.steps} make {settings.max_model_len} "
            f"tokens, the model takes {longest}: lower them"
        )
    return path


def _loop(options: argparse.Namespace, settings: Settings, results: list[dict[str, Any]]) -> None:
    from servelite.bench.engine_loop import measure_loop
    from servelite.bench.engine_report import LOOP_HEAD, loop_row
    from servelite.bench.progress import ProgressLine

    steps, line = 10 * options.steps, ProgressLine()
    print(
        f"the engine's loop, simulated executor: microseconds, medians of {steps} decode steps, "
        f"{options.context} tokens of context\n{LOOP_HEAD}",
        flush=True,
    )
    for batch in options.batch:
        with line.of(f"loop, batch {batch}") as watch:
            costs = measure_loop(batch, options.context, steps, settings.block_size, watch)
        results.append({"part": "loop"} | dataclasses.asdict(costs))
        print(loop_row(costs), flush=True)


def _runner(
    options: argparse.Namespace,
    settings: Settings,
    path: Path,
    sampling: SamplingParams,
    results: list[dict[str, Any]],
) -> None:
    os.environ.update(child_environment())  # before torch is loaded, as the engine's process has it
    from servelite.bench.engine_report import RUNNER_HEAD, runner_row
    from servelite.bench.engine_runner import RunnerBenchmark
    from servelite.bench.progress import ProgressLine
    from servelite.tokenizer.model_files import ModelFileError
    from servelite.worker.base import StepFailedError
    from servelite.worker.load import load_runner

    try:
        runner = load_runner(settings, path)
    except ModelFileError as error:
        raise _Failed(str(error), ExitCode.MODEL) from None
    benchmark, line, facts = RunnerBenchmark(runner, sampling), ProgressLine(), runner.facts
    threads = os.environ["OMP_NUM_THREADS"]
    print(
        f"\nthe model runner, {options.model} in {facts.dtype} on {facts.device}, {threads} threads: "
        f"milliseconds, medians of {options.steps} decode steps after {options.context} tokens of "
        f"context\n{RUNNER_HEAD}",
        flush=True,
    )
    for batch in options.batch:
        try:
            with line.of(f"runner, batch {batch}") as watch:
                costs = benchmark.measure(batch, options.context, options.steps, watch)
        except StepFailedError as error:
            raise _Failed(f"--batch {batch}: {error}", ExitCode.MEMORY) from None
        results.append({"part": "runner"} | dataclasses.asdict(costs))
        print(runner_row(costs), flush=True)
