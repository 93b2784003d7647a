"""Chat templates: messages to text, and which control tokens in that text the template itself wrote.

Templates come with models, so they run in Jinja's immutable sandbox, with the helpers that Hugging
Face gives them. Their text is the model's; what users put into messages is not, and may spell a
control token. `ChatTemplate.render` tells the two apart, so that the tokenizer can read the first as
control tokens and the second as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

from servelite.tokenizer.template_limits import TURN_NAME, BoundedEnvironment, Budget, TemplateLimit
from servelite.tokenizer.tokenizer import control_pattern

_SENTINELS: Final = range(0xF0000, 0xFFFFE)  # a plane for private use


class InvalidTemplate(ValueError):
    """A chat template that is no valid Jinja; the text names the line."""


class TemplateRefusal(ValueError):
    """The template does not take these messages; the text is its own reason."""


@dataclass(frozen=True)
class Rendered:
    """A rendered chat. `controls`: ascending character spans of the template's own control tokens."""

    text: str
    controls: list[tuple[int, int]]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training; here it only opens a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: plain JSON, where Jinja's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class ChatTemplate:
    """A compiled chat template; threads may share it."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, special_tokens: Sequence[str]) -> None:
        """Compile `source`.

        Args:
            bos_token, eos_token: what the template sees under these names.
            special_tokens: the texts of all control tokens.

        Raises:
            InvalidTemplate: `source` is no valid Jinja.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidTemplate(
                f"the chat template is not valid, line {error.lineno}: {error.message}"
            ) from None
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._forgeries = _Forgeries([text for text in special_tokens if text])

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> Rendered:
        """The text of a conversation.

        Where a user's text spells a control token (or has a piece of one at its border, which could
        become one with its neighbour), the template is given characters that occur nowhere else in
        their place, and they are put back afterwards as plain text: no user can write a control
        token, whatever the template does. Only a template whose logic looks at the very spelling of
        a control token in a message can notice.

        Args:
            messages: dicts of plain JSON values; keys with None are left out, as in transformers.
            continue_final_message: end the text where the last message's content ends.
            kwargs: more for the template to see: `tools`, `documents`, `enable_thinking`, ...

        Raises:
            TemplateRefusal: the template called `raise_exception`, failed on these messages, or did not
                end within its bounds (`template_limits`).
        """
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        inputs: dict[str, Any] = {"tools": None, "documents": None, **kwargs, "messages": messages}
        pieces: set[str] = set()
        _visit_strings(inputs, lambda string: pieces.update(self._forgeries.find(string)))
        sentinels: dict[str, str] = {}
        end = ""
        if pieces or continue_final_message:
            free = self._free_characters(inputs)
            sentinels = {piece: next(free) for piece in sorted(pieces)}
            inputs = _map_strings(inputs, lambda string: self._forgeries.replace(string, sentinels))
        if continue_final_message:
            end = next(free)
            last = inputs["messages"][-1]
            inputs["messages"][-1] = last | {"content": last.get("content", "") + end}
        text = self._run(inputs | {"add_generation_prompt": add_generation_prompt})
        if end:
            if end not in text:
                raise TemplateRefusal("it does not write the content of the message to be continued")
            text = text[: text.rindex(end)].replace(end, "")
        return _put_back(text, sentinels, self._forgeries.controls)

    def _run(self, inputs: dict[str, Any]) -> str:
        budget = Budget()
        try:
            pieces = self._template.generate(**self._tokens | inputs | {TURN_NAME: budget.turn})
            return budget.collect(pieces)
        except TemplateRefusal:
            raise
        except TemplateLimit as limit:
            raise TemplateRefusal(str(limit)) from None
        except Exception as error:  # the template is the model's code: whatever it raises is its refusal
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from None

    def _free_characters(self, inputs: dict[str, Any]) -> Iterator[str]:
        """Characters that are neither in the template nor in what users wrote."""
        used = set(self._source)
        _visit_strings(inputs, used.update)
        yield from (chr(code) for code in _SENTINELS if chr(code) not in used)
        raise TemplateRefusal("the messages use up a whole plane of private-use characters")


class _Forgeries:
    """Finds what in a user's string is a control token's text, or could become part of one.

    The latter: an end of a control token at the string's beginning, or a beginning of one at its
    end. A plain identifier (a role, a key) is never cut at its borders.
    """

    def __init__(self, controls: list[str]) -> None:
        self.controls = control_pattern(controls)
        self._heads = {text[i:] for text in controls for i in range(1, len(text))}
        self._tails = {text[:i] for text in controls for i in range(1, len(text))}
        self._longest = max(map(len, controls), default=1) - 1

    def find(self, string: str) -> list[str]:
        """The pieces to be replaced."""
        return [part for i, part in enumerate(self._split(string)) if i % 2 and part]

    def replace(self, string: str, by: Mapping[str, str]) -> str:
        """`string` with each piece replaced."""
        parts = self._split(string)
        return "".join([by[part] if i % 2 and part else part for i, part in enumerate(parts)])

    def _split(self, string: str) -> list[str]:
        """`string` cut up: harmless text at even indices, pieces to be replaced at odd ones."""
        parts: list[str] = []
        at = 0
        for match in self.controls.finditer(string):
            parts += [string[at : match.start()], match[0]]
            at = match.end()
        parts.append(string[at:])
        if not string or (len(parts) == 1 and string.isidentifier()):
            return parts
        first = parts[0]
        lengths = range(min(self._longest, len(first)), 0, -1)
        head = next((n for n in lengths if first[:n] in self._heads), 0)
        parts[:1] = ["", first[:head], first[head:]]
        last = parts[-1]
        lengths = range(min(self._longest, len(last)), 0, -1)
        tail = next((n for n in lengths if last[len(last) - n :] in self._tails), 0)
        parts[-1:] = [last[: len(last) - tail], last[len(last) - tail :]]
        return parts


def _visit_strings(value: Any, visit: Callable[[str], object]) -> None:
    """Call `visit` for every string in a JSON value, keys included."""
    if isinstance(value, str):
        visit(value)
    elif isinstance(value, dict):
        for key, one in value.items():
            visit(key)
            _visit_strings(one, visit)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _visit_strings(one, visit)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(one, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(one, change) for one in value]
    return value


def _put_back(text: str, sentinels: Mapping[str, str], controls: re.Pattern[str]) -> Rendered:
    """`text` with the users' pieces instead of the sentinels, and where its own control tokens are.

    Control tokens are looked for while the sentinels are in place, so a user's piece is in none.
    """
    spans = [match.span() for match in controls.finditer(text)]
    if not sentinels:
        return Rendered(text, spans)
    pieces = {sentinel: piece for piece, sentinel in sentinels.items()}
    parts: list[str] = []
    moved: list[tuple[int, int]] = []
    at = length = 0
    for first, last in [*spans, (len(text), len(text))]:
        between = "".join([pieces.get(character, character) for character in text[at:first]])
        parts += [between, text[first:last]]
        length += len(between)
        moved.append((length, length + last - first))
        length += last - first
        at = last
    return Rendered("".join(parts), moved[:-1])
