"""Grammars for the answers of a chat: calls in the format's own words, and reasoning before any of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.parsers.bodies import NAME
from servelite.frontend.parsers.formats import Begin, ChatFormats, ReasoningFormat, ToolFormat
from servelite.frontend.parsers.tag_values import value_types
from servelite.frontend.schema_keywords import ANNOTATIONS, ENFORCED, FORMATS, Holds, check_schema
from servelite.frontend.thinking import ThinkingLimit
from servelite.frontend.tools import ToolUse, parameters_of
from servelite.tokenizer.grammar import GrammarKind, grammar_text, json_rule

SplitControls = Callable[[str], Sequence[str | int]]
"""A text with its control tokens as IDs."""

_OF_ARGUMENTS: Final = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
_SPACE_AFTER: Final = r'" "? ("\n" | "\n\n")?'
_ANY_TEXT: Final = r"/(?s:.*)/"
_OF_STRINGS: Final = ("minLength", "maxLength", "pattern", "format")
_OF_BRACES: Final[dict[str, tuple[str, ...]]] = {
    "string": ("type", "enum", "const", *_OF_STRINGS),
    "object": _OF_ARGUMENTS,
    "array": ("type", "items", "minItems", "maxItems"),
}
_SPECIAL: Final = re.compile(r"[.+*?()|\[\]{}^$/\\]")  # in regular expressions, and what ends one
_SLASH: Final = re.compile(r"(\\.)|/", re.DOTALL)


class Lark:
    """A grammar in llguidance's dialect of Lark, rule by rule."""

    def __init__(self, split: SplitControls) -> None:
        self._split = split
        self._rules: list[str] = []
        self._named = 0

    def define(self, name: str, body: str) -> None:
        """The rule `name`."""
        self._rules.append(f"{name}: {body}")

    def name(self) -> str:
        """A new rule's name."""
        self._named += 1
        return f"r{self._named}"

    def rule(self, body: str) -> str:
        """A new rule; returns its name."""
        name = self.name()
        self.define(name, body)
        return name

    def literal(self, text: str) -> str:
        """`text`, in which a control token's name stands for the token; "" is nothing."""
        parts = self._split(text)
        return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)

    def text_before(self, end: str) -> str:
        """Any text, then `end`, which the text does not hold."""
        parts = self._split(end)
        if parts and isinstance(parts[0], int):  # no text can hold a control token
            self._named += 1
            self._rules.append(f"T{self._named}: {_ANY_TEXT}")
            return f"T{self._named} {self.literal(end)}"
        self._named += 1
        escaped = _SPECIAL.sub(r"\\\g<0>", end).replace("\n", "\\n")
        self._rules.append(f"r{self._named}[lazy]: /(?s:.*){escaped}/")
        return f"r{self._named}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON by a schema."""
        return self.rule(json_rule(dict(schema)))

    def finish(self, start: str) -> str:
        """The whole grammar, as it travels."""
        return grammar_text(GrammarKind.LARK, "\n".join([f"start: {start}", *self._rules]) + "\n")


@dataclass(frozen=True)
class CallableFunction:
    """A function that may be called. `place`: of its arguments' schema in the request."""

    name: str
    schema: Mapping[str, Any]
    strict: bool
    place: str

    @property
    def grammar(self) -> str:
        """Of its arguments as JSON, as it travels."""
        return grammar_text(GrammarKind.JSON_SCHEMA, self.schema)


def functions_of(use: ToolUse) -> list[CallableFunction]:
    """The functions that may be called.

    A strict function's schema must be one that can be enforced; of another one, what cannot be is left out.

    Raises:
        APIError: 400; names the schema and the keyword.
    """
    functions = []
    for i, tool in enumerate(use.tools):
        function, place = tool["function"], f"tools[{i}].function.parameters"
        name, strict = function["name"], bool(function.get("strict"))
        if use.choice.mode == "named" and name != use.choice.name:
            continue
        schema = {"type": "object", **parameters_of(function)}
        schema = schema if strict else _weaker(schema)
        check_schema(schema, place)
        functions.append(CallableFunction(name, schema, strict, place))
    return functions


def _weaker(schema: Any) -> Any:
    """A schema without the keywords that are not enforced: what it refuses, the whole one does too."""
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        holds = ENFORCED.get(keyword)
        if holds is None or (keyword == "format" and value not in FORMATS):
            continue
        if holds is Holds.BY_NAME and isinstance(value, Mapping):
            kept[keyword] = {name: _weaker(inner) for name, inner in value.items()}
        elif isinstance(value, list) and holds in (Holds.SCHEMAS, Holds.ONE_OR_MORE):
            kept[keyword] = [_weaker(inner) for inner in value]
        else:
            kept[keyword] = _weaker(value) if holds in (Holds.SCHEMA, Holds.ONE_OR_MORE) else value
    return kept


def chat_grammar(
    functions: Sequence[CallableFunction],
    answer: str,
    formats: ChatFormats,
    split: SplitControls,
    *,
    parallel: bool,
    begin: Begin,
    limit: ThinkingLimit | None = None,
) -> str:
    """The grammar of a chat's answer: reasoning, then calls or what else it may be.

    Args:
        functions: those that may be called, if any; their `grammar`s compile, and calls are looked for.
        answer: the grammar of an answer that is no call; "": it has to be one.
        parallel: more than one call is allowed.
        begin: where the answer begins.
        limit: of the reasoning.

    Raises:
        APIError: 400; a strict function's schema cannot be enforced in this format.
    """
    lark = Lark(split)
    final = ""
    if formats.reasoning is not None and not formats.reasoning.opening:
        final = lark.literal("<|channel|>final<|message|>")
    ways = []
    if functions:
        assert formats.tools is not None
        ways.append(_calls(lark, functions, formats.tools, parallel))
    if answer:
        ways.append(f"{final} {_answer(lark, answer)}")
    return lark.finish(f"{_before(lark, formats.reasoning, begin, limit)} ({' | '.join(ways)})")


def _calls(lark: Lark, functions: Sequence[CallableFunction], form: ToolFormat, parallel: bool) -> str:
    """The rule of one call, or of several."""
    written = form.written
    calls = []
    for one in functions:
        arguments = _Arguments(lark, form, one).rule()
        before = lark.literal(written.start + one.name + written.middle)
        calls.append(f"{before} {arguments} {lark.literal(written.end)}")
    call = lark.rule(" | ".join(calls))
    body = f"{lark.literal(written.first)} {call}"
    if parallel and written.joint is not None:
        joint = lark.literal(written.joint)
        body += f" ({joint} {call})*" if joint else f" {call}*"
    return lark.rule(f"{body} {lark.literal(written.last)}")


def _answer(lark: Lark, grammar: str) -> str:
    """The rule of a grammar, as it travels, within another one."""
    read = json.loads(grammar)
    value = read.get("value")
    match GrammarKind(read["kind"]):
        case GrammarKind.JSON_SCHEMA:
            return lark.json(value)
        case GrammarKind.JSON_OBJECT:
            return lark.json({"type": "object"})
        case GrammarKind.REGEX:
            pattern = _SLASH.sub(lambda one: one[1] or "\\/", value).replace("\n", "\\n")
            return lark.rule(f"/{pattern}/")
        case GrammarKind.CHOICE:
            return lark.rule(" | ".join(map(json.dumps, value)))
        case GrammarKind.LARK:
            return lark.rule(f"%lark {{\n{value}\n}}")


def _before(lark: Lark, form: ReasoningFormat | None, begin: Begin, limit: ThinkingLimit | None) -> str:
    """Reasoning, where the format has any."""
    if form is None or begin is Begin.AFTER:
        return ""
    if not form.opening:
        analysis, following = (
            lark.literal("<|channel|>analysis<|message|>"),
            lark.literal("<|start|>assistant"),
        )
        return f"({analysis} {lark.text_before('<|end|>')} {following})?"
    thought = lark.text_before(form.closing) if limit is None else limit.rule
    inside = f"{thought} {lark.rule(_SPACE_AFTER)}"
    if begin is Begin.INSIDE:
        return inside
    opening = lark.literal(form.opening) if limit is None else f"<[{limit.opening}]>"
    return f"({opening} {inside})?"


class _Arguments:
    """The arguments of one function, in the format's own writing."""

    def __init__(self, lark: Lark, form: ToolFormat, function: CallableFunction) -> None:
        self._lark = lark
        self._form = form
        self._function = function
        schema = function.schema
        self._shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        self._any = ""

    def rule(self) -> str:
        """The rule's name."""
        kind, schema = self._form.written.arguments, self._function.schema
        if kind == "json":
            return self._lark.json(schema)
        for keyword in schema:
            if keyword not in _OF_ARGUMENTS and keyword not in ("title", "description", "$schema"):
                self._refuse(keyword)
        if kind == "braces":
            return self._lark.rule(f'"{{" {self._members(schema, self._braces_member, ",")} "}}"')
        if kind == "tags":
            return self._members(schema, self._tag, "")
        return self._members(schema, self._keyword, ", ")

    def _members(
        self, schema: Mapping[str, Any], write: Callable[[str, Mapping[str, Any]], str], comma: str
    ) -> str:
        """The properties in their order; what is not required may be left out."""
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        joint = f"{json.dumps(comma)} " if comma else ""
        later = first = self._lark.rule('""')  # what follows a member; and what follows none
        for key in reversed(list(properties)):
            self._check_key(key)
            one = properties[key]
            member = write(key, one if isinstance(one, Mapping) else {})
            skip_later, skip_first = ("", "") if key in required else (f"{later} | ", f"{first} | ")
            first = self._lark.rule(f"{skip_first}{member} {later}")
            later = self._lark.rule(f"{skip_later}{joint}{member} {later}")
        return first

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._lark.json({**schema, **self._shared})

    def _tag(self, key: str, schema: Mapping[str, Any]) -> str:
        tags = self._form.tags
        assert tags is not None
        before = self._lark.literal(f"{tags.parameter}{key}{tags.key_end}\n")
        after = f"\n{tags.parameter_close}\n"
        types = value_types({"properties": {key: schema}}, key)
        if types == {"string"}:
            return f"{before} {self._string(schema, after)}"
        if not types or types & {"string", "other"}:  # it is read as text, so that JSON would be quoted twice
            self._refuse("a value that may be a string or something else")
            return f"{before} {self._lark.text_before(after)}"
        return f"{before} {self._json(schema)} {self._lark.literal(after)}"

    def _keyword(self, key: str, schema: Mapping[str, Any]) -> str:
        return f"{json.dumps(key + '=')} {self._json(schema)}"

    def _string(self, schema: Mapping[str, Any], end: str) -> str:
        """A string without quotes, then `end`."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values:
            return self._lark.rule(" | ".join(self._lark.literal(f"{value}{end}") for value in values))
        for keyword in _OF_STRINGS:
            if keyword in schema:
                self._refuse(keyword)
        return self._lark.text_before(end)

    def _braces_member(self, key: str, schema: Mapping[str, Any]) -> str:
        return f"{json.dumps(key + ':')} {self._braces(schema)}"

    def _braces(self, schema: Mapping[str, Any]) -> str:
        """A value. Some keywords have no equal in rules: `_refuse` says so, and any value is allowed."""
        types = value_types({"properties": {"": schema}}, "")
        if len(types) > 1 and isinstance(schema.get("type"), list):
            return self._lark.rule(" | ".join(self._braces({**schema, "type": one}) for one in sorted(types)))
        (kind,) = types if len(types) == 1 else ("",)
        if kind in ("integer", "number", "boolean", "null"):
            return self._json(schema)
        for keyword in schema:
            if keyword not in _OF_BRACES.get(kind, ()) and keyword not in ANNOTATIONS:
                self._refuse(keyword)
                return self._any_braces()
        quote = self._form.quote
        if kind == "string":
            return f"{self._lark.literal(quote)} {self._string(schema, quote)}"
        if kind == "object" and schema.get("properties"):
            return self._lark.rule(f'"{{" {self._members(schema, self._braces_member, ",")} "}}"')
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            return self._braces_list(schema)
        self._refuse("type")
        return self._any_braces()

    def _braces_list(self, schema: Mapping[str, Any]) -> str:
        item = self._lark.rule(self._braces(schema["items"]))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        more = f"{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        items = "" if most == 0 else f'({item} ("," {item}){more})'
        return self._lark.rule(f'"[" {items}{"?" if items and not least else ""} "]"')

    def _any_braces(self) -> str:
        """Any value."""
        if not self._any:
            lark, quote = self._lark, self._form.quote
            scalar = lark.json({"type": ["number", "boolean", "null"]})
            self._any = value = lark.name()
            string = f"{lark.literal(quote)} {lark.text_before(quote)}"
            key = lark.rule(r"/[A-Za-z_][A-Za-z0-9_]*/")
            members = f'"{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"'
            lark.define(value, f'{string} | {scalar} | "[" ({value} ("," {value})*)? "]" | {members}')
        return self._any

    def _refuse(self, keyword: str) -> None:
        if self._function.strict:
            raise bad_request(
                f"{self._function.place}: {keyword[:60]} cannot be enforced on calls in this model's format, "
                f"{self._form.name}; leave strict out",
                self._function.place,
                "unsupported_schema",
            )

    def _check_key(self, key: str) -> None:
        """Raises for a parameter that the format has no way to write."""
        python = self._form.written.arguments == "python"
        if not (key.isidentifier() if python else NAME.fullmatch(key) and ":" not in key):
            raise bad_request(
                f"{self._function.place}: the parameter {key[:60]!r} cannot be written in this model's "
                f"format, {self._form.name}",
                self._function.place,
                "unsupported_schema",
            )
