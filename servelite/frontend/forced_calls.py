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
from servelite.frontend.lark import LONG, Lark, SplitControls
from servelite.frontend.parsers.bodies import NAME
from servelite.frontend.parsers.formats import Begin, ChatFormats, ReasoningFormat, ToolFormat
from servelite.frontend.parsers.tag_values import converted
from servelite.frontend.schema_keywords import with_each
from servelite.frontend.thinking import ThinkingLimit
from servelite.frontend.tools import ToolUse, parameters_of
from servelite.frontend.unions import Unions, resolve
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text

_SHARED: Final = ("$defs", "definitions")
_OF_ARGUMENTS: Final = ("type", "properties", "required", "additionalProperties", *_SHARED)
_SPACE_AFTER: Final = r'" "? ("\n" | "\n\n")?'
_LENGTHS: Final = ("minLength", "maxLength")
_OF_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "string": (*_LENGTHS, "pattern"),
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
_MAX_CHARS: Final = 4 << 20  # of all schemas, as they are written with the `$defs` of each parameter
_MOST: Final = 100_000  # characters that a text without quotes has at most: a longer one is not written
_LONG_BESIDE: Final = 100  # or at most, where it may not be an object or a list: 0.5 ms to compile each
_HOPS: Final = 20  # of references and unions, from a schema to its branches
_ROOT: Final = "the arguments"  # a name among `$defs`
_TO_PARTS: Final = r'#(?!/\$defs/|/definitions/)(?=[/"]|$)'  # in references: to what is no definition
_SLASH: Final = re.compile(r"(\\.)|/", re.DOTALL)


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
        kind = GrammarKind.JSON_SCHEMA if self.strict else GrammarKind.LOOSE_SCHEMA
        return grammar_text(kind, self.schema)

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
        case _:  # Lark
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
        self._any: dict[str, str] = {}
        self._waiting: list[Any] = []
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
            if beside := set(schema).difference(("$ref", "type", *_SHARED)):
                self._refuse(min(beside))
            target = resolve(self._root, schema["$ref"])
            schema = {**(target if isinstance(target, Mapping) else {}), **self._shared}
        for keyword in schema:
            if keyword not in _OF_ARGUMENTS:
                self._refuse(keyword)
        if kind == "braces":
            made = self._lark.rule(f'"{{" {self._members(schema, self._braces_member, ",")} "}}"')
            while self._waiting:
                one = self._waiting.pop()
                ways = [self._braces_of(way) for way in self._branches(one)]
                self._lark.define(self._made[id(one)][1], " | ".join(ways))
            return made
        if kind == "tags":
            return self._members(schema, self._tag, "")
        return self._members(schema, lambda key, one: f"{json.dumps(key + '=')} {self._json(one)}", ", ")

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
        if self._lark.chars > _MAX_CHARS:
            raise bad_request(
                f"{self._function.place}: in this model's format, {self._form.name}, parameters are written "
                f"with all definitions of their schema: together these have over {_MAX_CHARS} characters",
                self._function.place,
                "invalid_grammar",
            )
        return self._lark.json({**schema, **self._shared})

    def _branches(self, schema: Any, hops: int = _HOPS, seen: set[int] | None = None) -> Iterator[Any]:
        """What a schema is a union of, each of one type where that can be; itself where it is none. Nothing
        for what allows nothing, or was met before."""
        seen = set() if seen is None else seen
        if schema is False or id(schema) in seen:
            return
        seen.add(id(schema))
        if not isinstance(schema, Mapping) or hops == 0:
            yield schema
        elif set(schema) in ({"$ref"}, {"anyOf"}, {"oneOf"}) or (
            set(schema) == {"allOf"} and len(schema["allOf"]) == 1
        ):
            ((word, inner),) = schema.items()
            for one in [resolve(self._root, inner)] if word == "$ref" else inner:
                yield from self._branches(one, hops - 1, seen)
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

    def _string(self, schema: Mapping[str, Any], end: str, unlike: Collection[str] = ()) -> str:
        """A string without quotes, then `end`; `unlike`: the types that it must not be read as."""
        before = "\n" if self._form.tags is not None else ""
        for keyword in schema:
            if keyword == "pattern" or keyword not in _OF_BRACES["string"]:
                self._refuse("pattern (or format)" if keyword == "pattern" else keyword)
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        most = None if most is None else min(most, _MOST)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values:
            fit = [value for value in values if least <= len(value) <= (_MOST if most is None else most)]
            read = [value for value in fit if json.loads(converted(value, {"string", *unlike})) == value]
            if written := [value for value in read if end not in value]:
                texts = (self._lark.literal(f"{value}{before}{end}") for value in written)
                return self._lark.rule(" | ".join(texts))
            self._refuse(f"the value {shown(values[0])}")
        counted, limit = least, LONG
        if not {"object", "array"}.isdisjoint(unlike):
            counted, limit = max(least, most or 0), _LONG_BESIDE
        if counted > limit:
            self._refuse(f"a length of {counted}, above {limit},")
            least, most = 0, None
        return self._lark.text_before(end, before, least, most, unlike)

    def _braces_member(self, key: str, schema: Mapping[str, Any]) -> str:
        return f"{json.dumps(key + ':')} {self._braces(schema)}"

    def _braces(self, schema: Any) -> str:
        """The rule of a value, made once, and later: a schema may be a part of itself, or in very many."""
        for _ in range(_HOPS):
            if isinstance(schema, Mapping) and set(schema) == {"$ref"}:
                schema = resolve(self._root, schema["$ref"])
        if id(schema) not in self._made:
            self._made[id(schema)] = (schema, self._lark.name())
            self._waiting.append(schema)
        return self._made[id(schema)][1]

    def _braces_of(self, schema: Any) -> str:
        """A value. Some keywords have no equal in rules: `_refuse` says so, and any of its type is right."""
        kinds = self._unions.kinds(schema)
        if kinds and kinds <= {"integer", "fraction", "boolean", "null"}:
            return self._json(schema)
        (kind,) = kinds if len(kinds) == 1 else ("",)
        for keyword in schema if isinstance(schema, Mapping) else ():
            if keyword not in _OF_BRACES.get(kind, ()):
                self._refuse(keyword)
                return self._any_braces(kind)
        quote = self._form.quote
        if kind == "string":
            return f"{self._lark.literal(quote)} {self._string(schema, quote)}"
        if kind == "object" and schema.get("properties"):
            return self._lark.rule(f'"{{" {self._members(schema, self._braces_member, ",")} "}}"')
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            return self._braces_list(schema)
        self._refuse("type")
        return self._any_braces(kind)

    def _braces_list(self, schema: Mapping[str, Any]) -> str:
        item = self._braces(schema["items"])
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        more = f"{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        rest = "" if most == 1 else f'("," {item}){more}'
        items = "" if most == 0 else f"({item} {rest})"
        return self._lark.rule(f'"[" {items}{"?" if items and not least else ""} "]"')

    def _any_braces(self, kind: str) -> str:
        """Any value of a type; "": of any."""
        if not self._any:
            lark, quote, value = self._lark, self._form.quote, self._lark.name()
            key = lark.rule(r"/[A-Za-z_][A-Za-z0-9_]*/")
            self._any = {
                "string": lark.rule(f"{lark.literal(quote)} {lark.text_before(quote)}"),
                "array": lark.rule(f'"[" ({value} ("," {value})*)? "]"'),
                "object": lark.rule(f'"{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"'),
            }
            scalar = lark.json({"type": ["number", "boolean", "null"]})
            lark.define(value, " | ".join([*self._any.values(), scalar]))
            self._any[""] = value
        return self._any[kind]

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
    if not re.search(rf'"\$ref": "{_TO_PARTS}', text):
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
    if isinstance(target, str) and re.match(_TO_PARTS, target):
        linked["$ref"] = f"#/$defs/{quote(_ROOT)}{target[1:]}"
    return linked
