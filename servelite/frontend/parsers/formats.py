"""The formats of tool calls and of reasoning: what models write, as data.

A new model's format is an entry here where its parts are those of another one; only a new kind of
body is code (`bodies`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

HARMONY: Final = "harmony"
HARMONY_MARKERS: Final = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
_HARMONY_HINTS: Final = (("<|channel|>", "<|message|>", "analysis"),)


@dataclass(frozen=True)
class Tags:
    """The tags of a call whose parameters are elements of their own."""

    function: str
    name_end: str
    function_close: str
    parameter: str
    key_end: str
    parameter_close: str


@dataclass(frozen=True)
class Written:
    """How calls are written where an answer has to be one: `first`, calls with `joint` between, `last`.

    A call is `start`, the name, `middle`, its arguments, `end`. No `joint`: one call only.
    """

    start: str
    middle: str
    end: str
    joint: str | None = None
    first: str = ""
    last: str = ""
    arguments: str = "json"  # or "tags", "python", "braces"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call.

    Attributes:
        name: as `--tool-call-parser` has it; vLLM's names.
        body: `json` an object with name and arguments, or a list of such; `named` a name, then the
            arguments' object; `json or named`; `tags` elements; `python` a list of calls; `braces`
            a name, then an object with bare keys; `harmony` messages with a recipient.
        written: the one form of it that a forced call has.
        openings: each may stand before a call.
        bare: a call also begins with this character, where the content does; its function must be
            one that was declared, or else it is content.
        closings: what may stand behind a call, in this order, each at will.
        argument_keys: of `json`.
        after_name: what may stand between name and arguments (`named`), in this order.
        call_id: a marker before an ID of the model's own, which stands there (`named`).
        quote: what a string begins and ends with (`braces`).
        call_id_length: of the IDs that the model's template takes; 0: any.
        hints: texts of a chat template that is written for it: each group's texts all occur.
        special: more markers.
    """

    name: str
    body: str
    written: Written
    openings: tuple[str, ...] = ()
    bare: str = ""
    closings: tuple[str, ...] = ()
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    after_name: tuple[str, ...] = ()
    call_id: str = ""
    quote: str = ""
    tags: Tags | None = None
    call_id_length: int = 0
    hints: tuple[tuple[str, ...], ...] = ()
    special: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text of the format. The control tokens in them have to reach the parser."""
        return (*self.openings, *self.closings, *self.after_name, self.call_id, self.quote, *self.special)


class Begin(enum.Enum):
    """Where an answer begins, by its prompt."""

    ANYWHERE = enum.auto()  # the model opens its reasoning, or does not
    INSIDE = enum.auto()  # of the reasoning, which the prompt has opened
    AFTER = enum.auto()  # the prompt has closed it


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks what it thinks.

    Attributes:
        name: as `--reasoning-parser` has it; vLLM's names.
        implied: an answer begins inside, whether or not the prompt ends with the opening.
        hints: as those of `ToolFormat`.
    """

    name: str
    opening: str
    closing: str
    implied: bool = False
    hints: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text of the format."""
        return (self.opening, self.closing) if self.opening else HARMONY_MARKERS

    def begin(self, prompt: str, continued: str | None) -> Begin:
        """Where an answer to `prompt` begins.

        Args:
            continued: the text of the assistant's message that the answer continues; None: it is new.
        """
        if not self.opening:
            return Begin.ANYWHERE
        if continued is not None:
            inside = continued.rfind(self.opening) > continued.rfind(self.closing)
            return Begin.INSIDE if inside else Begin.AFTER
        end = prompt.rstrip()
        if end.endswith(self.closing):
            return Begin.AFTER
        return Begin.INSIDE if self.implied or end.endswith(self.opening.rstrip()) else Begin.ANYWHERE


# The first whose hints are found is taken: the more particular come first.
TOOL_FORMATS: Final = (
    ToolFormat(
        "openai",
        HARMONY,
        Written("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        special=HARMONY_MARKERS,
        hints=_HARMONY_HINTS,
    ),
    ToolFormat(
        "qwen3_coder",
        "tags",
        Written("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", arguments="tags"),
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        tags=Tags("<function=", ">", "</function>", "<parameter=", ">", "</parameter>"),
        hints=(("<tool_call>", "<function=", "<parameter="),),
    ),
    ToolFormat(
        "deepseek_v3",
        "named",
        Written(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "\n",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
        openings=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        ),
        after_name=("```json",),
        closings=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        hints=(("<｜tool▁call▁begin｜>", "```json"),),
    ),
    ToolFormat(
        "deepseek_v31",
        "named",
        Written(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
        openings=("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>"),
        after_name=("<｜tool▁sep｜>",),
        closings=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        hints=(("<｜tool▁call▁begin｜>",),),
    ),
    ToolFormat(
        "mistral",
        "json or named",
        Written('{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
        openings=("[TOOL_CALLS]",),
        call_id="[CALL_ID]",
        after_name=("[ARGS]",),
        call_id_length=9,
        hints=(("[TOOL_CALLS]",),),
    ),
    ToolFormat(
        "gemma4",
        "braces",
        Written("<|tool_call>call:", "", "<tool_call|>", "", arguments="braces"),
        openings=("<|tool_call>",),
        closings=("<tool_call|>",),
        quote='<|"|>',
        hints=(("<|tool_call>",),),
    ),
    ToolFormat(
        "functiongemma",
        "braces",
        Written("<start_function_call>call:", "", "<end_function_call>", "", arguments="braces"),
        openings=("<start_function_call>",),
        closings=("<end_function_call>",),
        quote="<escape>",
        hints=(("<start_function_call>",),),
    ),
    ToolFormat(
        "hermes",
        "json",
        Written('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        hints=(("<tool_call>",),),
    ),
    ToolFormat(
        "pythonic",
        "python",
        Written("", "(", ")", ", ", "[", "]", arguments="python"),
        openings=("<|tool_call_start|>", "<|python_start|>", "<|python_tag|>"),
        bare="[",
        closings=("<|tool_call_end|>", "<|python_end|>"),
        hints=(
            ("<|tool_call_start|>",),
            ("<|python_start|>",),
            ("[func_name1(",),
            ("<|start_header_id|>", "func_name1("),
        ),
    ),
    ToolFormat(
        "llama3_json",
        "json",
        Written('{"name": "', '", "parameters": ', "}", "; "),
        openings=("<|python_tag|>",),
        bare="{",
        closings=(";",),
        hints=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
    ),
)
"""By preference of `choose_tool_format`."""

REASONING_FORMATS: Final = (
    ReasoningFormat("openai_gptoss", "", "", hints=_HARMONY_HINTS),
    ReasoningFormat(
        "deepseek_r1",
        "<think>",
        "</think>",
        implied=True,
        hints=(("<｜Assistant｜>", "</think>"), ("<｜Assistant｜>", "<think>")),
    ),
    ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>", hints=(("<|channel>", "<channel|>"),)),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", hints=(("[THINK]",),)),
    ReasoningFormat("qwen3", "<think>", "</think>", hints=(("<think>",), ("</think>",))),
)

TOOL_FORMAT_NAMES: Final = tuple(sorted(f.name for f in TOOL_FORMATS))
REASONING_FORMAT_NAMES: Final = tuple(sorted(f.name for f in REASONING_FORMATS))
FALLBACK: Final = "hermes"
"""What a model is told to write whose template knows no tools."""


def tool_format(name: str) -> ToolFormat:
    """The format of that name; raises `KeyError`."""
    return {f.name: f for f in TOOL_FORMATS}[name]


def choose_tool_format(parser: str, template: str) -> ToolFormat | None:
    """By `--tool-call-parser`, or under `auto` by the chat template; None: calls are not looked for."""
    if parser == "none":
        return None
    if parser != "auto":
        return tool_format(parser)
    return next((f for f in TOOL_FORMATS if _hinted(f.hints, template)), tool_format(FALLBACK))


def choose_reasoning_format(parser: str, template: str) -> ReasoningFormat | None:
    """By `--reasoning-parser`, or under `auto` by the chat template; None: nothing is set apart."""
    if parser == "none":
        return None
    if parser != "auto":
        return {f.name: f for f in REASONING_FORMATS}[parser]
    return next((f for f in REASONING_FORMATS if _hinted(f.hints, template)), None)


def _hinted(hints: tuple[tuple[str, ...], ...], template: str) -> bool:
    return any(all(text in template for text in group) for group in hints)


@dataclass(frozen=True)
class ChatFormats:
    """What the answers of one model are read by."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def choose(cls, tool_call_parser: str, reasoning_parser: str, template: str) -> ChatFormats:
        """By the two settings, and under `auto` by the chat template."""
        return cls(
            choose_tool_format(tool_call_parser, template),
            choose_reasoning_format(reasoning_parser, template),
        )

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """The texts that have to reach the parser; `tools`: calls are looked for."""
        calls = self.tools.markers if self.tools is not None and tools else ()
        return tuple(filter(None, (*calls, *(self.reasoning.markers if self.reasoning else ()))))
