"""Grammars for the answers of a chat: calls in the format's own words, and reasoning before any of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import shown
from servelite.frontend.parsers.bodies import NAME
from servelite.frontend.parsers.formats import Begin, ChatFormats, ReasoningFormat, ToolFormat
from servelite.frontend.parsers.tag_values import converted
from servelite.frontend.schema_keywords import with_each
from servelite.frontend.thinking import ThinkingLimit
from servelite.frontend.tools import ToolUse, parameters_of
from servelite.frontend.unions import Unions, resolve
from servelite.tokenizer.grammar import GrammarKind, grammar_text, json_rule

SplitControls = Callable[[str], Sequence[str | int]]
"""A text with its control tokens as IDs."""

_SHARED: Final = ("$defs", "definitions")
_OF_ARGUMENTS: Final = ("type", "properties", "required", "additionalProperties", *_SHARED)
_SPACE_AFTER: Final = r'" "? ("\n" | "\n\n")?'
_LENGTHS: Final = ("minLength", "maxLength")
_OF_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "string": (*_LENGTHS, "pattern", "format"),
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (*_OF_ARGUMENTS[1:4], "patternProperties", "minProperties", "maxProperties"),
}
"""Keywords that ask nothing of values of another type."""
_OF_BRACES: Final[dict[str, tuple[str, ...]]] = {
    "string": ("type", "enum", "const", *_OF_TYPES["string"]),
    "object": _OF_ARGUMENTS,
    "array": ("type", "items", "minItems", "maxItems"),
}
_SPACE: Final = r"[\s\x1c-\x1f]*"
_NUMBER: Final = r"-?[0-9][0-9.eE+\-]*"
_WRITTEN: Final = {
    "integer": _NUMBER,
    "fraction": _NUMBER,
    "boolean": "[tT]rue|[fF]alse",
    "null": "null|None",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
"""What a text is like that would be read as another type where that is allowed too."""
_LONG: Final = 1000  # characters that a text without quotes has at least: more take long to compile
_MOST: Final = 100_000  # or at most: a longer one is not written
_LONG_BESIDE: Final = 100  # or at most, where it may not be an object or a list: 0.5 ms to compile each
_HOPS: Final = 20  # of references and unions, from a schema to its branches
_ROOT: Final = "the arguments"  # a name among `$defs`
_SPECIAL: Final = re.compile(r"[.+*?()|\[\]{}^$/\\]")  # in regular expressions, and what ends one
_SLASH: Final = re.compile(r"(\\.)|/", re.DOTALL)


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", "\\n")


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

    def text_before(
        self,
        end: str,
        before: str = "",
        least: int = 0,
        most: int | None = None,
        unlike: Collection[str] = (),
    ) -> str:
        """Any text, then `before` and `end`.

        Args:
            end: the text does not hold it.
            least: characters of the text; `most` as well.
            unlike: names in `_WRITTEN` of what the text may not be, but for white space around it.
        """
        control = isinstance(self._split(end)[0], int)  # which no text can hold
        if least and not (control or before):  # a longer one takes more to compile than the library allows
            most = min(_LONG if most is None else most, _LONG)
        escaped = _escaped(end)
        last = _escaped(before) + ("" if control else escaped)
        body = f"/(?s:.{{{least},{'' if most is None else most}}}){last}/"
        self._named += 1
        if not (control or before or least or unlike):  # the first end that comes is the one
            self._rules.append(f"r{self._named}[lazy]: {body}")
            return f"r{self._named}"
        if not control:
            body += f" & ~/(?s:.*){escaped}(?s:.+)/"
        if unlike:
            kinds = "|".join(sorted({_WRITTEN[kind] for kind in unlike}))
            body += f" & ~/{_SPACE}({kinds}){_SPACE}{last}/"
        self._rules.append(f"T{self._named}: {body}")
        return f"T{self._named} {self.literal(end)}" if control else f"T{self._named}"

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
        """Of its arguments as JSON, as it travels: to be checked before it is written into another one."""
        return grammar_text(GrammarKind.JSON_SCHEMA, self.schema)

    def following(self, checked: str) -> CallableFunction:
        """The function with the schema of its grammar as it was checked."""
        return replace(self, schema=json.loads(checked)["value"])


def functions_of(use: ToolUse) -> list[CallableFunction]:
    """The functions that may be called, their schemas as they were sent.

    A strict function's schema must be one that can be enforced; of another one, what cannot be is left out:
    both when its grammar is checked.
    """
    functions = []
    for i, tool in enumerate(use.tools):
        function = tool["function"]
        place = use.places[i] if use.places else f"tools[{i}].function.parameters"
        name, strict = function["name"], bool(function.get("strict"))
        if use.choice.mode == "named" and name != use.choice.name:
            continue
        schema = {"type": "object", **parameters_of(function)}
        functions.append(CallableFunction(name, schema, strict, place))
    return functions


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
        functions: those that may be called, if any, as checked; calls are looked for.
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
        self._root = _rooted(function.schema)
        self._unions = Unions(self._root)
        self._shared = {name: self._root[name] for name in _SHARED if name in self._root}
        self._any = ""
        self._made: dict[int, tuple[Any, str]] = {}  # schemas, by their identity, and their rules

    def rule(self) -> str:
        """The rule's name."""
        kind = self._form.written.arguments
        if kind == "json":
            return self._lark.json(self._function.schema)
        schema = self._root
        for _ in range(_HOPS):
            if "$ref" not in schema:
                break
            target = resolve(self._root, schema["$ref"])
            schema = {**(target if isinstance(target, Mapping) else {}), **self._shared}
        for keyword in schema:
            if keyword not in _OF_ARGUMENTS:
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
        required, properties = set(schema.get("required") or ()), dict(schema.get("properties") or {})
        for key in schema.get("required") or ():
            properties.setdefault(key, schema.get("additionalProperties", {}))
        joint = f"{json.dumps(comma)} " if comma else ""
        later = first = self._lark.rule('""')  # what follows a member; and what follows none
        for key in reversed(properties):
            if next(self._branches(properties[key]), None) is None:
                continue
            if not self._can_write(key, key in required):
                continue
            one = properties[key]
            member = write(key, one if isinstance(one, Mapping) else {})
            skip_later, skip_first = ("", "") if key in required else (f"{later} | ", f"{first} | ")
            first = self._lark.rule(f"{skip_first}{member} {later}")
            later = self._lark.rule(f"{skip_later}{joint}{member} {later}")
        return first

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._lark.json({**schema, **self._shared})

    def _branches(self, schema: Any, hops: int = _HOPS) -> Iterator[Any]:
        """What a schema is a union of, each of one type where that can be; itself where it is none. Nothing
        for what allows nothing."""
        if schema is False:
            return
        if not isinstance(schema, Mapping) or hops == 0:
            yield schema
        elif set(schema) == {"$ref"}:
            yield from self._branches(resolve(self._root, schema["$ref"]), hops - 1)
        elif set(schema) in ({"anyOf"}, {"oneOf"}):
            (branches,) = schema.values()
            for one in branches:
                yield from self._branches(one, hops - 1)
        elif isinstance(schema.get("enum"), list) and "const" not in schema:
            for strings in (True, False):
                values = [value for value in schema["enum"] if isinstance(value, str) is strings]
                if self._unions.kinds(one := {**schema, "enum": values}):
                    yield one
        elif isinstance(schema.get("type"), list):
            for one in schema["type"]:
                others = {word for kind, words in _OF_TYPES.items() if kind != one for word in words}
                others -= set(_OF_TYPES.get(one, ()))
                yield {**{word: schema[word] for word in schema if word not in others}, "type": one}
        else:
            yield schema

    def _tag(self, key: str, schema: Mapping[str, Any]) -> str:
        """A parameter between its tags. It is read as a string where it cannot be another of its types."""
        tags = self._form.tags
        assert tags is not None
        begin = self._lark.literal(f"{tags.parameter}{key}{tags.key_end}\n")
        close = tags.parameter_close
        kinds = self._unions.kinds(schema)
        ways, others = [], []
        for one in self._branches(schema):
            found = self._unions.kinds(one)
            if "string" not in found:
                others.append(one)
            elif found == {"string"}:
                ways.append(self._string(one, close, kinds - found))
            else:
                if one is not True and one != {}:  # of which any text would be one
                    self._refuse("a value of many types that are not listed")
                ways, others = [self._lark.text_before(close, "\n")], []
                break
        after = self._lark.literal(f"\n{close}")
        ways += [f"{self._json(one)} {after}" for one in others]
        return self._lark.rule(f'{begin} {self._lark.rule(" | ".join(ways))} "\\n"')

    def _keyword(self, key: str, schema: Mapping[str, Any]) -> str:
        return f"{json.dumps(key + '=')} {self._json(schema)}"

    def _string(self, schema: Mapping[str, Any], end: str, unlike: Collection[str] = ()) -> str:
        """A string without quotes, then `end`; `unlike`: the types that it must not be read as."""
        before = "\n" if self._form.tags is not None else ""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values:
            read = [value for value in values if json.loads(converted(value, {"string", *unlike})) == value]
            if written := [value for value in read if end not in value]:
                texts = (self._lark.literal(f"{value}{before}{end}") for value in written)
                return self._lark.rule(" | ".join(texts))
            self._refuse(f"the value {shown(values[0])}")
        for keyword in ("pattern", "format"):
            if keyword in schema:
                self._refuse(keyword)
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        most = None if most is None else min(most, _MOST)
        counted, limit = least, _LONG
        if not {"object", "array"}.isdisjoint(unlike):
            counted, limit = max(least, most or 0), _LONG_BESIDE
        if counted > limit:
            self._refuse(f"a length of {counted}, above {limit},")
            least, most = 0, None
        return self._lark.text_before(end, before, least, most, unlike)

    def _braces_member(self, key: str, schema: Mapping[str, Any]) -> str:
        return f"{json.dumps(key + ':')} {self._braces(schema)}"

    def _braces(self, schema: Any) -> str:
        """The rule of a value, made once: a schema may be a part of itself."""
        while isinstance(schema, Mapping) and set(schema) == {"$ref"}:
            schema = resolve(self._root, schema["$ref"])
        if id(schema) not in self._made:
            name = self._lark.name()
            self._made[id(schema)] = (schema, name)
            self._lark.define(name, " | ".join(self._braces_of(one) for one in self._branches(schema)))
        return self._made[id(schema)][1]

    def _braces_of(self, schema: Any) -> str:
        """A value. Some keywords have no equal in rules: `_refuse` says so, and any value is allowed."""
        kinds = self._unions.kinds(schema)
        if kinds and kinds <= {"integer", "fraction", "boolean", "null"}:
            return self._json(schema)
        (kind,) = kinds if len(kinds) == 1 else ("",)
        for keyword in schema if isinstance(schema, Mapping) else ():
            if keyword not in _OF_BRACES.get(kind, ()):
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
        item = self._braces(schema["items"])
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        more = f"{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        rest = "" if most == 1 else f'("," {item}){more}'
        items = "" if most == 0 else f"({item} {rest})"
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

    def _can_write(self, key: str, required: bool) -> bool:
        """Whether the format has a way to write a parameter; raises where it may not be left out."""
        python = self._form.written.arguments == "python"
        if key.isidentifier() if python else NAME.fullmatch(key) and ":" not in key:
            return True
        if not (required or self._function.strict):
            return False
        raise bad_request(
            f"{self._function.place}: the parameter {key[:60]!r} cannot be written in this model's "
            f"format, {self._form.name}",
            self._function.place,
            "unsupported_schema",
        )


def _rooted(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema whose references all go to its definitions: its parts are written into rules of their own."""
    text = json.dumps(schema)
    if not re.search(r'"\$ref": "#(?!/\$defs/|/definitions/)', text):
        return schema
    parts = {name: one for name, one in schema.items() if name not in _SHARED}
    shared = {name: schema[name] for name in _SHARED if name in schema}
    whole = {**parts, **shared, "$defs": {**shared.get("$defs", {}), _ROOT: parts}}
    linked: Mapping[str, Any] = _linked(whole)
    return linked


def _linked(schema: Any) -> Any:
    """`schema` with its references to the root's parts as ones to `_ROOT`'s. Values, as of `enum`, stay."""
    if not isinstance(schema, Mapping):
        return schema
    linked = {keyword: with_each(keyword, value, _linked) for keyword, value in schema.items()}
    target = linked.get("$ref")
    if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
        linked["$ref"] = f"#/$defs/{quote(_ROOT)}{target[1:]}"
    return linked
