"""Keyword arguments as Python writes them, turned into a JSON object."""

from __future__ import annotations

import ast
import re
from typing import Any, Final

from servelite.frontend.parsers.json_text import dump
from servelite.frontend.parsers.reader import NotACall, Reader, Steps
from servelite.frontend.parsers.sink import Sink

_KEY: Final = re.compile(r"\w+")
_PLAIN: Final = re.compile(r"[^\"'\\()\[\]{},]+")
_WORDS: Final[dict[str, Any]] = {"true": True, "false": False, "null": None}
_ESCAPES: Final = "\n\\'\"abfnrtvxuUN01234567"
_MAX_DEPTH: Final = 64


def copy_arguments(reader: Reader, sink: Sink, name: str) -> Steps[None]:
    """The call of `name`, from behind its opening parenthesis to behind the closing one.

    Its values come whole, one by one; the call begins with the first.
    """
    opening = "{"
    while (yield from reader.skip_space()) != ")":
        if opening == ", ":
            reader.mark()
            yield from reader.expect(",")
            if (yield from reader.skip_space()) == ")":  # a last comma
                break
        key = yield from reader.run(_KEY)
        yield from reader.skip_space()
        yield from reader.expect("=")
        value = _as_json((yield from _value(reader)))
        if opening == "{":
            sink.start(name)
        reader.commit()
        sink.arguments(f"{opening}{dump(key)}: {value}")
        opening = ", "
    reader.at += 1
    reader.commit()
    if opening == "{":
        sink.start(name)
    sink.arguments("{}" if opening == "{" else "}")
    sink.end()


def _value(reader: Reader) -> Steps[str]:
    """A value's text, up to the comma or the parenthesis behind it."""
    parts: list[str] = []
    closers: list[str] = []
    while True:
        parts.append((yield from reader.run(_PLAIN)))
        character = yield from reader.peek()
        if character in "\"'":
            yield from _string(reader, parts, character)
            continue
        if character in ",)" and not closers:
            return "".join(parts)
        if character in "([{":
            closers.append({"(": ")", "[": "]", "{": "}"}[character])
            if len(closers) > _MAX_DEPTH:
                raise NotACall
        elif character != "," and (not closers or character != closers.pop()):
            raise NotACall
        parts.append(character)
        reader.at += 1


def _string(reader: Reader, parts: list[str], quote: str) -> Steps[None]:
    """A string's text with its quotes; line breaks in it are escaped, as Python wants them."""
    parts.append(quote)
    reader.at += 1
    inside = re.compile(rf"[^{quote}\\]+")
    while True:
        parts.append((yield from reader.run(inside)).replace("\n", "\\n").replace("\r", "\\r"))
        parts.append((yield from reader.peek()))
        reader.at += 1
        if parts[-1] == quote:
            return
        escaped = yield from reader.peek()
        parts.append(escaped if escaped in _ESCAPES else "\\" + escaped)
        reader.at += 1


def _as_json(text: str) -> str:
    """A Python literal (or JSON's true, false, null) as JSON; raises `NotACall`."""
    try:
        return dump(_literal(ast.parse(text.strip(), mode="eval").body))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise NotACall from None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_key(key): _literal(value) for key, value in pairs}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if type(value) in (int, float):
            return -value
    raise ValueError


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _literal(node)
    if not isinstance(key, str):
        raise ValueError
    return key
