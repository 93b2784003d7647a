"""Every setting, declared once: flags, `--help`, environment variables and the docs' table come from here.

A setting is a field of `Settings`; its flag is the field's name with dashes, its environment
variable `SERVELITE_` and the name in capitals (another spelling of the flag, no more). The one
`Settings` object is made by the command line (or `LLM`) and passed down; nothing reads the
environment or the command line after that.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from dataclasses import dataclass, field
from typing import Any


class SettingError(ValueError):
    """A setting with a value it cannot have; the text names the flag, the value and the limit."""


def _setting(
    default: Any,
    text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str = "",
) -> Any:
    meta = {"text": text, "low": low, "high": high, "choices": choices, "metavar": metavar}
    if isinstance(default, tuple):
        return field(default_factory=lambda: default, metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Settings:
    """What `servelite serve` can be told. Frozen: a part that needs another value makes a copy."""

    model: str = _setting("demo", "a GGUF file, a Hugging Face folder, or `demo`")
    served_model_name: tuple[str, ...] = _setting(
        (), "the name clients use, several allowed; not given: the model as it was named"
    )
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    runtime_dir: str = _setting(
        "", "folder for the engine's sockets; not given: a fresh temporary one", metavar="DIR"
    )
    max_model_len: int = _setting(
        0, "longest prompt plus answer, in tokens; 0: the model's own", low=0, high=1 << 24
    )
    max_num_seqs: int = _setting(64, "requests that run at once", low=1, high=4096)
    max_num_batched_tokens: int = _setting(
        512, "token budget of one step, at least --max-num-seqs", low=1, high=1 << 20
    )
    block_size: int = _setting(16, "tokens in a KV block", low=1, high=1024)
    num_gpu_blocks_override: int = _setting(
        0, "KV blocks in the pool, on any device; 0: by memory", low=0, high=1 << 28
    )
    kv_cache_memory_bytes: int = _setting(
        0, "bytes for the KV pool; 0: min(4 GiB, 40 % of what is available)", low=0
    )
    enable_prefix_caching: bool = _setting(True, "reuse the KV blocks of prompts that begin alike")
    scheduling_policy: str = _setting(
        "fcfs",
        "who runs first: `fcfs` in order of arrival, `priority` by the request's `priority`, lowest first",
        choices=("fcfs", "priority"),
    )
    async_depth: int = _setting(1, "steps in flight at once", low=1, high=8)
    max_waiting_requests: int = _setting(
        256, "requests that may wait for a row; beyond it a 503 with Retry-After", low=0, high=1 << 20
    )
    max_waiting_tokens: int = _setting(
        1 << 20, "prompt tokens that may wait; beyond it a 503 with Retry-After", low=1
    )
    executor: str = _setting(
        "auto",
        "`auto` runs the model; `simulated` runs none and yields pseudo-random or scripted tokens",
        choices=("auto", "simulated"),
    )
    simulated_step_ms: float = _setting(
        -1.0, "a fixed time a step for the simulated executor; not given: a cost model", low=-1.0
    )
    simulated_script: str = _setting(
        "", 'JSON lines {"prompt": ..., "text": ...}: what the simulated executor answers', metavar="FILE"
    )
    drain_timeout: float = _setting(
        30.0, "seconds that answers in flight have to finish after SIGTERM", low=0.0, high=86400.0
    )
    log_level: str = _setting("info", "how much to log", choices=("debug", "info", "warning", "error"))
    debug: bool = _setting(False, "tracebacks, and the engine's invariants checked after every step")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check_bounds(f, getattr(self, f.name))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, less than --max-num-seqs "
                f"{self.max_num_seqs}: each running request needs a token a step; raise the one or lower "
                "the other"
            )
        if self.executor != "simulated" and (self.simulated_script or self.simulated_step_ms >= 0):
            raise SettingError("--simulated-script and --simulated-step-ms need --executor simulated")

    def to_dict(self) -> dict[str, object]:
        """Plain values, for a message to a child process."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """The inverse of `to_dict` (lists become tuples again)."""
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)


def flag_of(name: str) -> str:
    """The command-line flag of the setting `name`."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of the setting `name`."""
    return "SERVELITE_" + name.upper()


def _check_bounds(f: dataclasses.Field[Any], value: Any) -> None:
    low, high, choices = f.metadata["low"], f.metadata["high"], f.metadata["choices"]
    if choices and value not in choices:
        raise SettingError(f"{flag_of(f.name)} is {value!r}, not one of: {', '.join(choices)}")
    if low is not None and value < low:
        raise SettingError(f"{flag_of(f.name)} is {value}, below its least value {low}")
    if high is not None and value > high:
        raise SettingError(f"{flag_of(f.name)} is {value}, above its largest value {high}")


def _types() -> dict[str, Any]:
    return typing.get_type_hints(Settings)


def _parse(name: str, kind: Any, text: str) -> Any:
    """A setting's value from its environment variable's text."""
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off", ""):
            return False
        raise SettingError(f"{variable_of(name)} is {text!r}, neither true nor false")
    if isinstance(kind, types.GenericAlias):
        return tuple(part for part in text.split(",") if part)
    try:
        return kind(text)
    except ValueError:
        raise SettingError(f"{variable_of(name)} is {text!r}, not a {kind.__name__}") from None


def add_flags(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ("model",)) -> None:
    """Give `parser` a flag for every setting but those in `skip`; absent flags leave no trace."""
    kinds = _types()
    for f in dataclasses.fields(Settings):
        if f.name in skip:
            continue
        kind = kinds[f.name]
        options: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS}
        default = f.default if f.default is not dataclasses.MISSING else ""
        shown = "" if default in ("", -1.0, False) else f" (default {default})"
        options["help"] = (f.metadata["text"] + shown).replace("%", "%%")
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(kind, types.GenericAlias):
            options |= {"nargs": "+", "metavar": "NAME"}
        else:
            options |= {"type": kind, "metavar": f.metadata["metavar"] or kind.__name__.upper()}
            if f.metadata["choices"]:
                options["metavar"] = "{" + ",".join(f.metadata["choices"]) + "}"
        parser.add_argument(flag_of(f.name), **options)


def settings_from(given: dict[str, Any], environ: typing.Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags (`given` wins), then environment variables, then defaults.

    Raises:
        SettingError: a value is out of its bounds or of the wrong type.
    """
    values: dict[str, Any] = {}
    kinds = _types()
    for f in dataclasses.fields(Settings):
        if f.name in given:
            value = given[f.name]
            values[f.name] = tuple(value) if isinstance(value, list) else value
        elif variable_of(f.name) in environ:
            values[f.name] = _parse(f.name, kinds[f.name], environ[variable_of(f.name)])
    return Settings(**values)


def flag_table() -> str:
    """The docs' Markdown table of all settings."""
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for f in dataclasses.fields(Settings):
        default = f.default if f.default is not dataclasses.MISSING else "none"
        shown = "" if default == "" or default == -1.0 else f"`{default}`"
        name = "`MODEL`" if f.name == "model" else f"`{flag_of(f.name)}`"
        rows.append(f"| {name} | {shown} | {f.metadata['text']} |")
    return "\n".join(rows) + "\n"
