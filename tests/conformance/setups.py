"""How the servers of the cases are started, and which of them any given server can stand for."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.conformance.target import Target, given_url
from tests.http.server import running_server
from tests.tokenizer.small_folder import save, sentencepiece

BLOCK_SIZE = 16
KEY = "a-key"
SMALL = "small"  # a folder with a tokenizer and without a chat template, made for the run
GEMMA = "gemma"
WEIGHTS = "weights"  # the small folder with random weights

REFUSING_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "system" -%}{{ raise_exception("System role not supported") }}{%- endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
[{{ call.function.name }} {{ call.function.arguments | tojson }}]
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
<start_of_turn>{{ "model" if message.role == "assistant" else message.role }}
{{ message.content }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}<start_of_turn>model
{% endif -%}
"""

TWO_CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "c"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)

SCRIPT = {
    "call both of them": TWO_CALLS,
    "zebra_sum": "the name of the call is there",
    "quagga 21": "its output is there",
}
"""What the scripted model answers, by a text of the prompt."""


@dataclass(frozen=True)
class Setup:
    """A server's model and flags."""

    name: str
    flags: tuple[str, ...]
    model: str = "demo"
    key: str = ""
    template: str = ""
    vocab: int = 20_000  # token IDs below which there are plain tokens
    anyone: bool = False  # nothing that a given server could not do by itself

    @property
    def real(self) -> bool:
        """Whether it holds a model's weights."""
        return "simulated" not in self.flags


def _simulated(milliseconds: float, *flags: str) -> tuple[str, ...]:
    block = ("--block-size", str(BLOCK_SIZE))
    return ("--executor", "simulated", "--simulated-step-ms", str(milliseconds), *block, *flags)


PLAIN = Setup("plain", _simulated(0.2, "--max-model-len", "512", "--async-depth", "2"), anyone=True)
PLAIN_UNCACHED = replace(
    PLAIN, name="plain, no prefix cache", flags=(*PLAIN.flags, "--no-enable-prefix-caching")
)
REAL = Setup(
    "real",
    ("--dtype", "float32", "--max-model-len", "512", "--max-num-batched-tokens", "64"),
    anyone=True,
)
TINY = Setup(
    "a small random model in float32",
    (
        "--dtype", "float32", "--max-model-len", "256", "--max-num-batched-tokens", "64",
        "--block-size", str(BLOCK_SIZE),
    ),
    model=WEIGHTS,
    vocab=264,
)  # fmt: skip
TINY_UNCACHED = replace(
    TINY, name=f"{TINY.name}, no prefix cache", flags=(*TINY.flags, "--no-enable-prefix-caching")
)
ODD = Setup(
    "own template, a key, unknown fields, no prefix cache",
    _simulated(0.2, "--no-enable-prefix-caching", "--unknown-fields", "warn"),
    key=KEY,
    template=REFUSING_TEMPLATE,
)
NARROW = Setup(
    "two rows and a short queue, a model without a chat template",
    _simulated(
        5, "--max-model-len", "512", "--max-num-seqs", "2", "--max-waiting-requests", "4",
        "--sse-keep-alive", "0.2",
    ),
    model=SMALL,
)  # fmt: skip
BUSY = Setup("four rows, long answers", _simulated(4, "--max-num-seqs", "4", "--max-model-len", "8192"))
LOADED = Setup(
    "Gemma with a chat template",
    _simulated(0.2, "--max-model-len", "2048"),
    model=GEMMA,
    template=GEMMA_TEMPLATE,
)


def pool_for(blocks: int, of: Setup) -> Setup:
    """The same with a KV pool of so many blocks, and answers that fit it."""
    longest = ("--max-model-len", str(min(256, blocks * BLOCK_SIZE)))
    flags = (*of.flags, *longest, "--num-gpu-blocks-override", str(blocks))
    return replace(of, name=f"{of.name}, {blocks} blocks", flags=flags, anyone=False)


class Servers:
    """The servers of a run, each started when a test first asks for it."""

    def __init__(self, folder: Path, models: dict[str, Path]) -> None:
        """`models`: where those are that have no name of their own."""
        self._folder, self.models = folder, models
        self._running: dict[Setup, tuple[Target, ExitStack]] = {}
        self._given: Target | None = None

    def get(self, setup: Setup) -> Target:
        """A server of this kind: the given one if any will do, else an own one; skips if neither is to be."""
        if not given_url():
            return self.own(setup)
        if not setup.anyone:
            pytest.skip(f"needs a server of its own ({setup.name})")
        if self._given is None:
            self._given = Target(given_url(), key=os.environ.get("OPENAI_API_KEY", ""))
        return self._given

    def own(self, setup: Setup) -> Target:
        """A server of this kind that was started for these tests; skips if one is given."""
        if given_url():
            pytest.skip(f"needs a server of its own ({setup.name})")
        if setup not in self._running:
            if setup.real:  # of those the machine has room for one
                for other in [other for other in self._running if other.real]:
                    self._running.pop(other)[1].close()
            stack = ExitStack()
            try:
                server = stack.enter_context(
                    running_server(self._folder, *self.arguments(setup), model=self.model(setup))
                )
                target = Target(server.url, key=setup.key, own=server)
                stack.callback(target.close)
            except BaseException:
                stack.close()
                raise
            self._running[setup] = target, stack
        return self._running[setup][0]

    def model(self, setup: Setup) -> str:
        """What is served."""
        if setup.model in (SMALL, WEIGHTS) and setup.model not in self.models:
            folder = save(self._folder / setup.model, sentencepiece(), vocab_size=1000)
            if setup.model == WEIGHTS:
                from tests.tiny_models import tiny_llama

                tiny_llama(folder, vocab_size=1000)
            self.models[setup.model] = folder
        if setup.model == "demo":
            return "demo"
        return str(self.models[setup.model])

    def arguments(self, setup: Setup) -> list[str]:
        """The setup's flags, its files written."""
        more = ["--api-key", setup.key] if setup.key else []
        if setup.template:
            path = self._folder / f"{len(setup.template)}.jinja"
            path.write_text(setup.template)
            more += ["--chat-template", str(path)]
        if setup == PLAIN:
            path = self._folder / "script.jsonl"
            lines = ({"prompt": prompt, "text": text} for prompt, text in SCRIPT.items())
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            more += ["--simulated-script", str(path)]
        return [*setup.flags, *more]

    def close(self) -> None:
        """End them all."""
        for _, stack in self._running.values():
            stack.close()
        if self._given is not None:
            self._given.close()
