"""Each format: what a model writes is read as what it means, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from servelite.config import Settings
from servelite.frontend.parsers.formats import (
    REASONING_FORMAT_NAMES,
    REASONING_FORMATS,
    TOOL_FORMAT_NAMES,
    TOOL_FORMATS,
    Begin,
    ChatFormats,
    tool_format,
)
from servelite.frontend.parsers.sink import CallRules
from tests.frontend.parsers.samples import BARE, RULES, Calls, cut, read, write

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<|`\r"), max_size=12)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "city": TEXT.filter(lambda text: text == text.strip("\n")),
    "days": st.integers(-(10**9), 10**9),
    "exact": st.booleans(),
    "more": st.dictionaries(
        st.from_regex(r"[a-z_]{1,6}", fullmatch=True),
        TEXT | st.integers(-99, 99) | st.booleans() | st.lists(st.integers(0, 9), max_size=3),
        max_size=3,
    ),
}
CALLS = st.lists(
    st.fixed_dictionaries({}, optional=VALUES).map(lambda arguments: ("get_weather", arguments))
    | st.just(("ping", dict[str, Any]())),
    min_size=1,
    max_size=3,
)
CUTS = st.lists(st.integers(0, 10**6), max_size=30)
WORDS = sorted(
    {marker for form in TOOL_FORMATS for marker in form.markers if marker}
    | {marker for form in REASONING_FORMATS for marker in form.markers}
    | {"<function=ping>", "</function>", "<parameter=city>", "</parameter>", "call:ping", "ping(", ")"}
    | {'{"name": "ping", "arguments": ', '"get_weather"', '{"city": "Oslo', '"}', "{}", "}", "[", "]"}
    | {"city=", "'", '"', "\\", "\\u00", "\n", " ", ",", ";", ":", "x", "東", "1", "true", "function"}
    | {"to=functions.ping", "analysis", "final", "assistant", '{"name": "ping"', "get_weather(city='a'"}
)
SOUP = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=14)
REASONING = st.sampled_from(["", *REASONING_FORMAT_NAMES])


@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
@settings(max_examples=25)
@given(calls=CALLS, lead=st.sampled_from(["", "Let me look.", "Two\n\nlines: é"]), cuts=CUTS)
def test_calls_are_read(form: str, calls: Calls, lead: str, cuts: list[int]) -> None:
    if form in BARE:
        lead = ""
    text = write(form, calls)
    if form == "openai":
        text = f"<|channel|>final<|message|>{lead}<|end|>" + text if lead else text
    elif lead:
        text = f"{lead}\n\n{text}"
    for pieces in ([text], list(text), cut(text, cuts)):
        found = read(pieces, form)
        assert found.content == lead
        assert found.parsed == calls
        assert found.ended == tuple(range(len(calls))) and found.ends_in_calls
        for (_, raw), (_, arguments) in zip(found.calls, calls, strict=True):
            for character in json.dumps(arguments, ensure_ascii=False):
                assert character < "\x80" or character in raw  # literal, never escaped


@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
@settings(max_examples=30)
@given(soup=SOUP, reasoning=REASONING, cuts=CUTS, opened=st.booleans())
@example(["<tool_call>", "{", "<tool_call>", '{"name": "ping", "arguments": ', "{}", "}"], "", [], False)
def test_a_stream_adds_up_to_the_plain_answer(
    form: str, soup: list[str], reasoning: str, cuts: list[int], opened: bool
) -> None:
    """Whatever the text is: markers, beginnings of calls, nonsense."""
    check_that_a_stream_adds_up(form, "".join(soup), reasoning, cuts, opened)


@pytest.mark.slow
@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
@settings(max_examples=1500)
@given(soup=SOUP, reasoning=REASONING, cuts=CUTS, opened=st.booleans())
def test_many_streams_add_up_to_the_plain_answer(
    form: str, soup: list[str], reasoning: str, cuts: list[int], opened: bool
) -> None:
    check_that_a_stream_adds_up(form, "".join(soup), reasoning, cuts, opened)


def check_that_a_stream_adds_up(form: str, text: str, reasoning: str, cuts: list[int], opened: bool) -> None:
    plain = read([text], form, reasoning, opened=opened)
    assert read(list(text), form, reasoning, opened=opened) == plain
    assert read(cut(text, cuts), form, reasoning, opened=opened) == plain
    for index in plain.ended:
        assert isinstance(json.loads(plain.calls[index][1]), dict)


@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
@settings(max_examples=25)
@given(calls=CALLS, at=st.integers(0, 10**6), cuts=CUTS)
def test_a_call_cut_off_comes_as_far_as_it_goes(form: str, calls: Calls, at: int, cuts: list[int]) -> None:
    text = write(form, calls)
    text = text[: at % (len(text) + 1)]
    whole, found = read([write(form, calls)], form), read([text], form)
    assert read(cut(text, cuts), form) == found
    assert len(found.calls) <= len(calls)
    for (name, arguments), (all_of_name, all_of_it) in zip(found.calls, whole.calls, strict=False):
        assert name == all_of_name and all_of_it.startswith(arguments)
    assert found.ended == tuple(range(len(found.ended)))
    for index in found.ended:
        assert json.loads(found.calls[index][1]) == calls[index][1]
    if found.calls:  # the beginning of another call may be left
        assert text.rstrip().endswith(found.content)


@given(st.text(st.sampled_from(" \n<tool_call>{}[]\"'x=:,;()|é")), CUTS, st.sampled_from(TOOL_FORMAT_NAMES))
def test_text_without_a_call_is_content_to_the_letter(text: str, cuts: list[int], form: str) -> None:
    found = read(cut(text, cuts), form)
    assert not found.calls and found.content == text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>is a tag</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "ping", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "ping", "arguments": "no JSON"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        ("hermes", "a < b and <tool_"),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>"),
        ("qwen3_coder", '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'),
        ("llama3_json", '{"name": "Alice", "parameters": {"age": 3}}'),
        ("llama3_json", 'As JSON: {"name": "ping", "parameters": {}}'),
        ("llama3_json", "{x | x > 0}"),
        ("pythonic", "[1, 2] is a list"),
        ("pythonic", "[ping] it"),
        ("pythonic", "[ping(1)]"),
        ("pythonic", "[other(city='a')]"),
        ("pythonic", "[get_weather(city=open('x'))]"),
        ("mistral", "[TOOL_CALLS] is a marker"),
        ("mistral", "[TOOL_CALLS][]"),
        ("functiongemma", "<start_function_call>ping"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>?"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>[1]"),
        ("openai", "to be or not to be"),
    ],
)
def test_what_only_looks_like_a_call_is_content(form: str, text: str) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces, form)
        assert (found.content, found.calls, found.ends_in_calls) == (text, [], False)


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"id": 1, "name": "f", "arguments": {}}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', [("f", {})]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>',
            [("f", {"a": "1\n2"})],
        ),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', [("f", {}), ("g", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u6771"}}', [("f", {"a": "東"})]),
        ("llama3_json", '<|python_tag|>{"name": "ping", "parameters": {}}', [("ping", {})]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g{}", [("f", {}), ("g", {})]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', [("f", {"a": 1})]),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter></tool_call>", [("f", {"a": 1})]),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=city>1</parameter>"
            "<parameter=exact>True</parameter></function></tool_call>",
            [("get_weather", {"city": "1", "exact": True})],
        ),
        ("pythonic", "[get_weather(city='a\\'b', days=-1, more={'a': [None, true]},)]", None),
        ("pythonic", "<|python_start|>[ping()]<|python_end|>", [("ping", {})]),
        ("functiongemma", "<start_function_call>call:f{a:Oslo, b:1.5}", [("f", {"a": "Oslo", "b": 1.5})]),
        (
            "openai",
            '<|channel|>commentary to=functions.f<|message|>{"a":1}<|call|>',
            [("f", {"a": 1})],
        ),
        (
            "openai",
            ' to=functions.f<|channel|>commentary json<|message|>{"a":1}',
            [("f", {"a": 1})],
        ),
    ],
)
def test_variants_that_models_write(form: str, text: str, calls: Calls | None) -> None:
    if calls is None:
        calls = [("get_weather", {"city": "a'b", "days": -1, "more": {"a": [None, True]}})]
    for pieces in ([text], list(text)):
        found = read(pieces, form)
        assert (found.parsed, found.content) == (calls, "")


@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
def test_at_most_one_call_is_told(form: str) -> None:
    text = write(form, [("ping", {}), ("get_weather", {"city": "Oslo"}), ("ping", {})])
    found = read(list(text), form, rules=CallRules(RULES.parameters, most=1))
    assert (found.parsed, found.content, found.ends_in_calls) == ([("ping", {})], "", True)


def test_a_call_that_breaks_off_ends_there_and_the_rest_is_content() -> None:
    for pieces in ([text := '<tool_call>{"name": "f", "arguments": {"a": oops}}'], list(text)):
        found = read(pieces, "hermes")
        assert (found.calls, found.content) == ([("f", '{"a": ')], "oops}}")
        assert not found.ended and not found.ends_in_calls


@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
def test_a_forced_call_that_is_cut_off_is_no_text(form: str) -> None:
    text = write(form, [("get_weather", {"city": "Oslo"})])
    for end in range(len(text)):
        assert read([text[:end]], form, rules=CallRules(RULES.parameters, forced=True)).content == "", end
    assert read([text[:9]], form).content or form == "openai"  # that may be one, or not


def test_call_ids_are_what_the_template_takes() -> None:
    assert tool_format("mistral").call_id_length == 9


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nHi", False, "Hm.", "Hi"),
        ("\nHm.\n</think>\n\nHi\n", True, "Hm.", "Hi"),
        ("<think>\nHm.\n</think>\n\nHi", True, "Hm.", "Hi"),  # a model that repeats the tag
        ("Hi <think>", False, "", "Hi <think>"),
        ("  Hi\n", False, "", "  Hi\n"),
        ("<thin", False, "", "<thin"),
        ("Hm", True, "Hm", ""),
        ("Hm </thin", True, "Hm </thin", ""),
        ("<think></think>Hi", False, "", "Hi"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ],
)
def test_reasoning(text: str, opened: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        for tools in ("", "hermes"):
            found = read(pieces, tools, "qwen3", opened=opened)
            assert (found.reasoning, found.content) == (reasoning, content)
            left_out = read(pieces, tools, "qwen3", opened=opened, include_reasoning=False)
            assert (left_out.reasoning, left_out.content) == ("", content)


def test_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>analysis<|message|>Then."
        "<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{"a":1}<|call|>'
    )
    for pieces in ([text], list(text)):
        found = read(pieces, "openai", "openai_gptoss")
        assert (found.reasoning, found.content) == ("First.\nThen.", "I look.")
        assert (found.parsed, found.ends_in_calls) == ([("ping", {"a": 1})], True)
        assert read(pieces, "", "openai_gptoss").content == 'I look.{"a":1}'


def test_reasoning_in_the_prompt() -> None:
    qwen, deepseek = (
        next(f for f in REASONING_FORMATS if f.name == name) for name in ("qwen3", "deepseek_r1")
    )
    inside, after, anywhere = Begin.INSIDE, Begin.AFTER, Begin.ANYWHERE
    assert qwen.begin("<|im_start|>assistant\n<think>\n", None) is inside
    assert qwen.begin("<|im_start|>assistant\n<think>\n\n</think>\n\n", None) is after
    assert qwen.begin("<think> is a tag\n<|im_start|>assistant\n", None) is anywhere
    assert qwen.begin("<|im_start|>assistant\n<think>\nHm", "<think>\nHm") is inside
    assert qwen.begin("...", "<think>\nHm</think> Hi") is after
    assert deepseek.begin("<｜Assistant｜>", None) is inside
    assert deepseek.begin("<｜Assistant｜><think>\n", None) is inside
    assert deepseek.begin("<｜Assistant｜></think>", None) is after


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", "hermes", None),
        ("<tool_call> {% if content.split('</think>') %}", "hermes", "qwen3"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder", None),
        ('<|start_header_id|> tools ... "parameters" <|python_tag|>', "llama3_json", None),
        ("<|start_header_id|> [func_name1(params_name1=...)]", "pythonic", None),
        ("[TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<start_function_call>call:", "functiongemma", None),
        ("<|tool_call>call: <|channel>thought<channel|>", "gemma4", "gemma4"),
        ("<｜Assistant｜> <｜tool▁call▁begin｜> ```json", "deepseek_v3", None),
        ("<｜Assistant｜> <｜tool▁call▁begin｜> </think>", "deepseek_v31", "deepseek_r1"),
        ("<|start|><|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    ],
)
def test_formats_are_chosen_by_the_template(template: str, tools: str, reasoning: str | None) -> None:
    chosen = ChatFormats.choose("auto", "auto", template)
    assert chosen.tools is not None and chosen.tools.name == tools
    assert (chosen.reasoning.name if chosen.reasoning else None) == reasoning
    assert ChatFormats.choose("none", "none", template) == ChatFormats()
    named = ChatFormats.choose("pythonic", "qwen3", template)
    assert (named.tools, named.reasoning and named.reasoning.name) == (tool_format("pythonic"), "qwen3")


def test_the_settings_know_every_format() -> None:
    for name, formats in (
        ("tool_call_parser", TOOL_FORMAT_NAMES),
        ("reasoning_parser", REASONING_FORMAT_NAMES),
    ):
        field = Settings.__dataclass_fields__[name]
        assert field.metadata["choices"] == ("auto", "none", *formats)


def test_no_marker_begins_with_another() -> None:
    for form in TOOL_FORMATS:
        for one in form.openings:
            assert not any(other != one and other.startswith(one) for other in form.openings)


@pytest.mark.parametrize("schema", [{"anyOf": 5}, {"type": 5}, {"type": [5]}, {"enum": 5}, 5, {"oneOf": [5]}])
def test_a_schema_that_is_none_breaks_no_stream(schema: Any) -> None:
    """Under `auto` schemas are only looked at."""
    rules = CallRules({"f": {"properties": {"a": schema}}})
    text = write("qwen3_coder", [("f", {"a": 1})])
    assert read([text], "qwen3_coder", rules=rules).parsed == [("f", {"a": 1})]
