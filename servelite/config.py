"""Every setting, declared once: flags, `--help`, environment variables and the docs' table come from here.

A setting is a field of `Settings`; its flag is the field's name with dashes, its environment
variable `SERVELITE_` and the name in capitals (another spelling of the flag, no more). The one
`Settings` object is made by the command line (or `LLM`) and passed down; nothing reads the
environment or the command line after that.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

_OTHER_VARIABLES: Final = ("SERVELITE_CACHE", "SERVELITE_ISA", "SERVELITE_TEST_")  # of ours, and no settings
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/]+")
_NOT: Final[dict[Any, str]] = {int: "not an integer", float: "not a number"}


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
    alias: str = "",
) -> Any:
    meta = {
        "text": text, "low": low, "high": high, "choices": choices, "metavar": metavar, "alias": alias
    }  # fmt: skip
    if isinstance(default, tuple):
        return field(default_factory=lambda: default, metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Settings:
    """What `servelite serve` can be told. Frozen: a part that needs another value makes a copy."""

    model: str = _setting(
        "demo", "a GGUF file, a Hugging Face folder, a hub id (ORG/NAME or ORG/NAME:FILE.gguf), or `demo`"
    )
    revision: str = _setting("", "branch, tag or commit of a hub id; not given: its main branch")
    served_model_name: tuple[str, ...] = _setting(
        (), "the name clients use, several allowed; not given: the model as it was named"
    )
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    api_workers: int = _setting(
        1, "front-end processes that share the port; one serves thousands of tokens a second", low=1, high=64
    )
    api_key: tuple[str, ...] = _setting(
        (),
        "keys that clients send as `Authorization: Bearer KEY`, several allowed; without one a request gets "
        "a 401, the health probes apart; not given: no key is asked for",
        metavar="KEY",
    )
    allowed_origins: tuple[str, ...] = _setting(
        (),
        "web origins (`https://chat.example`, or `*` for all) whose scripts may call the server from a "
        "browser; not given: none",
        metavar="ORIGIN",
    )
    ssl_certfile: str = _setting(
        "", "a PEM file with the certificate, then its chain: the server speaks TLS only", metavar="FILE"
    )
    ssl_keyfile: str = _setting(
        "",
        "a PEM file with the certificate's key, not encrypted; not given: it is in the certificate's file",
        metavar="FILE",
    )
    runtime_dir: str = _setting(
        "", "folder for the engine's sockets; not given: a fresh temporary one", metavar="DIR"
    )
    tokenizer: str = _setting(
        "", "a GGUF file or folder whose tokenizer to use instead of the model's", metavar="PATH"
    )
    chat_template: str = _setting(
        "", "a file with the chat template to use instead of the model's", metavar="FILE"
    )
    allow_special_tokens_in_text: bool = _setting(
        False,
        "read a control token that a prompt or message spells out as that token, as transformers does; "
        "whoever may write a text can then forge the turns of others",
    )
    tool_call_parser: str = _setting(
        "auto",
        "format of the model's tool calls: `auto` by the chat template, `none` not looked for",
        choices=(
            "auto", "none", "deepseek_v3", "deepseek_v31", "functiongemma", "gemma4", "hermes", "llama3_json",
            "mistral", "openai", "pythonic", "qwen3_coder",
        ),
    )  # fmt: skip
    reasoning_parser: str = _setting(
        "auto",
        "format of the model's reasoning: `auto` by the chat template, `none` not set apart",
        choices=("auto", "none", "deepseek_r1", "gemma4", "mistral", "openai_gptoss", "qwen3"),
    )
    generation_config: str = _setting(
        "auto",
        "sampling defaults: `auto` the model's generation_config.json, `none` OpenAI's, or another folder",
        metavar="{auto,none,DIR}",
    )
    pooling: str = _setting(
        "auto",
        "whose hidden state is a text's embedding: `auto` by the model's sentence-transformers files, else "
        "the `last` token's of a decoder and the `mean` of an encoder; `cls` is the first one's",
        choices=("auto", "mean", "last", "cls"),
    )
    dtype: str = _setting(
        "auto",
        "type of weights, activations and KV cache, whatever the checkpoint's: `auto` is float32 on a CPU; "
        "bfloat16 halves the memory",
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = _setting("auto", "what the model runs on", choices=("auto", "cpu"))
    tp: int = _setting(
        1,
        "tensor-parallel ranks: processes that share each layer of the model, and the cores between them",
        low=1,
        high=64,
        alias="--tensor-parallel-size",
    )
    seed: int = _setting(
        -1,
        "seed of requests that give none, each made from this and the request's number; -1: random ones",
        low=-1,
        high=(1 << 63) - 1,
    )
    max_model_len: int = _setting(
        0, "longest prompt plus answer, in tokens; 0: the model's own", low=0, high=1 << 24
    )
    gpu_memory_utilization: float = _setting(
        0.0,
        "share of the memory available at start that weights and KV pool take together, on any device; "
        "0: see --kv-cache-memory-bytes",
        low=0.0,
        high=1.0,
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
        0, "bytes for each rank's KV pool; 0: its part of min(4 GiB, 40 % of what is available)", low=0
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
    max_logprobs: int = _setting(20, "log probabilities a token that a request may ask for", low=0, high=1024)
    unknown_fields: str = _setting(
        "refuse",
        "a request field that is not declared: `refuse` with a 400, or `warn` in the log and ignore it",
        choices=("refuse", "warn"),
    )
    max_body_bytes: int = _setting(
        8 << 20, "largest request body; beyond it a 413", low=1 << 10, high=1 << 30
    )
    timeout_keep_alive: int = _setting(
        75, "seconds that an idle connection is kept, above the balancer's", low=1, high=86400
    )
    sse_keep_alive: float = _setting(
        10.0, "seconds of silence after which a stream gets an SSE comment", low=0.01, high=86400.0
    )
    executor: str = _setting(
        "auto",
        "`auto` runs the model; `simulated` runs none and yields pseudo-random or scripted tokens, for which "
        "of the sampling fields only seed, stops and length count",
        choices=("auto", "simulated"),
    )
    simulated_step_ms: float | None = _setting(
        None,
        "a fixed time a step for the simulated executor; not given: a cost model",
        low=0.0,
        high=86_400_000.0,
    )
    simulated_script: str = _setting(
        "", 'JSON lines {"prompt": ..., "text": ...}: what the simulated executor answers', metavar="FILE"
    )
    drain_delay: float = _setting(
        0.0,
        "seconds after SIGTERM in which readiness is off and requests are still served",
        low=0.0,
        high=86400.0,
    )
    drain_timeout: float = _setting(
        30.0, "seconds that answers in flight have to finish after SIGTERM", low=0.0, high=86400.0
    )
    on_engine_failure: str = _setting(
        "resume",
        "what becomes of answers in flight when the engine dies: `resume` on a new one, or `fail`",
        choices=("resume", "fail"),
    )
    stall_warning: float = _setting(
        5.0,
        "seconds without a step, with work to do, after which /health/ready says no; at least five times the "
        "slowest step seen",
        low=0.1,
        high=86400.0,
    )
    hang_timeout: float = _setting(
        60.0,
        "seconds without a sign of life (a layer computed), with work to do, after which the engine is "
        "killed and started again",
        low=0.1,
        high=86400.0,
    )
    recovery_timeout: float = _setting(
        120.0,
        "seconds that answers wait for a new engine; what is left then gets an error",
        low=0.0,
        high=86400.0,
    )
    log_level: str = _setting("info", "how much to log", choices=("debug", "info", "warning", "error"))
    debug: bool = _setting(False, "tracebacks, and the engine's invariants checked after every step")
    fault_injection: str = _setting(
        "",
        "faults for tests, with --debug only: `crash`, `exit`, `error`, `hang`, `collective`, `fail`, `nan`, "
        "`delay` or `drop`, each with `:step=N` or `:token=ID` of a prompt, and `,rank=R` behind it; several "
        "with `;`",
        metavar="FAULTS",
    )

    def __post_init__(self) -> None:
        kinds = _types()
        for f in dataclasses.fields(self):
            _check_type(f.name, kinds[f.name], getattr(self, f.name))
            _check_bounds(f, getattr(self, f.name))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, less than --max-num-seqs "
                f"{self.max_num_seqs}: each running request needs a token a step; raise the one or lower "
                "the other"
            )
        for name in ("api_key", "served_model_name", "allowed_origins"):
            if "" in getattr(self, name):
                raise SettingError(f"{flag_of(name)} is empty: give a value, or leave the flag out")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise SettingError(
                    f"--allowed-origins is {origin!r}; an origin is scheme, host and port at most, without a "
                    "path: https://chat.example, or * for all"
                )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise SettingError("--ssl-keyfile needs --ssl-certfile")
        if self.max_model_len == 1:
            raise SettingError("--max-model-len is 1: a prompt's token and an answer's are 2")
        if self.gpu_memory_utilization and (self.kv_cache_memory_bytes or self.num_gpu_blocks_override):
            raise SettingError(
                "--gpu-memory-utilization has no effect beside --kv-cache-memory-bytes or "
                "--num-gpu-blocks-override: give one of them"
            )
        if self.fault_injection and not self.debug:
            raise SettingError("--fault-injection needs --debug: it makes the engine fail on purpose")
        if not self.host:
            raise SettingError("--host is empty: give an address (0.0.0.0 or :: for all)")
        if not self.model:
            raise SettingError("MODEL is empty: give a GGUF file, a Hugging Face folder, a hub id, or `demo`")
        if self.executor == "simulated" and (self.kv_cache_memory_bytes or self.gpu_memory_utilization):
            raise SettingError(
                "--kv-cache-memory-bytes and --gpu-memory-utilization have no effect with --executor "
                "simulated, which has no memory: give --num-gpu-blocks-override"
            )
        if self.executor != "simulated" and (self.simulated_script or self.simulated_step_ms is not None):
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


def _check_type(name: str, kind: Any, value: Any) -> None:
    """A program may give anything; None is what a setting without a value has."""
    several = isinstance(kind, types.GenericAlias)
    wanted: Any = (tuple, list) if several else (int, float) if kind is float else kind
    right = isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))
    if several and right:
        right = all(isinstance(each, str) for each in value)
    if not right and value is not None:
        words = "a list of strings" if several else f"of type {kind.__name__}"
        raise SettingError(f"{flag_of(name)} is {value!r}, not {words}")


def _check_bounds(f: dataclasses.Field[Any], value: Any) -> None:
    low, high, choices = f.metadata["low"], f.metadata["high"], f.metadata["choices"]
    if value is None:
        return  # not given
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(f"{flag_of(f.name)} is {value}, not a finite number from {low} to {high}")
    if choices and value not in choices:
        raise SettingError(f"{flag_of(f.name)} is {value!r}, not one of: {', '.join(choices)}")
    if low is not None and value < low:
        raise SettingError(f"{flag_of(f.name)} is {value}, below its least value {low}")
    if high is not None and value > high:
        raise SettingError(f"{flag_of(f.name)} is {value}, above its largest value {high}")


def _types() -> dict[str, Any]:
    """By name; of `type | None` the type: a value that is given has it."""
    hints = typing.get_type_hints(Settings)
    return {
        name: kind.__args__[0] if isinstance(kind, types.UnionType) else kind for name, kind in hints.items()
    }


def _number(kind: Any) -> Callable[[str], Any]:
    """What argparse calls with a flag's text: its own complaint would say "invalid int value"."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is {_NOT[kind]}") from None

    return read


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
        raise SettingError(f"{variable_of(name)} is {text!r}, {_NOT[kind]}") from None


def add_flags(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ("model",)) -> None:
    """Give `parser` a flag for every setting but those in `skip`; absent flags leave no trace."""
    kinds = _types()
    for f in dataclasses.fields(Settings):
        if f.name in skip:
            continue
        kind = kinds[f.name]
        options: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS}
        default = f.default if f.default is not dataclasses.MISSING else ""
        shown = "" if default in ("", -1, False, None) else f" (default {default})"
        options["help"] = (f.metadata["text"] + shown).replace("%", "%%")
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(kind, types.GenericAlias):
            options |= {"nargs": "+", "action": "extend", "metavar": f.metadata["metavar"] or "NAME"}
        else:
            options |= {
                "type": _number(kind) if kind in _NOT else kind,
                "metavar": f.metadata["metavar"] or kind.__name__.upper(),
            }
            if f.metadata["choices"]:
                options["metavar"] = "{" + ",".join(f.metadata["choices"]) + "}"
        names = [flag_of(f.name), *filter(None, [f.metadata["alias"]])]
        parser.add_argument(*names, **options)


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


def unknown_variables(environ: typing.Mapping[str, str] = os.environ) -> list[str]:
    """Variables that look like settings and are none, most likely misspelled; sorted."""
    known = {variable_of(f.name) for f in dataclasses.fields(Settings)}
    return sorted(
        name
        for name in environ
        if name.startswith("SERVELITE_") and name not in known and not name.startswith(_OTHER_VARIABLES)
    )


def flag_table() -> str:
    """The docs' Markdown table of all settings. MODEL must be given: its default is for `Settings()`."""
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for f in dataclasses.fields(Settings):
        default = f.default if f.default is not dataclasses.MISSING else "none"
        shown = "" if default in ("", None) or f.name == "model" else f"`{default}`"
        name = "`MODEL`" if f.name == "model" else f"`{flag_of(f.name)}`"
        if default is True:
            name += f", `--no-{flag_of(f.name)[2:]}`"
        rows.append(f"| {name} | {shown} | {f.metadata['text']} |")
    return "\n".join(rows) + "\n"
