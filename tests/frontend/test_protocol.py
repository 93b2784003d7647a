"""Request bodies: what is taken, what is refused, and that the refusal names the field."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelite.frontend.errors import APIError
from servelite.frontend.fields import SHOWN, field_table, shown
from servelite.frontend.protocol import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    AnswerForm,
    BodyRules,
    RequestOptions,
    TemplateOptions,
    read_chat,
    read_completion,
)
from servelite.frontend.sampling import Sampling

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": MESSAGES} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hi"} | fields


def refusal(body: Any, read: Any = read_chat) -> APIError:
    with pytest.raises(APIError) as caught:
        read(body)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_openais() -> None:
    request = read_chat(chat())
    assert request.sampling == Sampling()
    assert request.options == RequestOptions() and request.form == AnswerForm()
    assert request.template == TemplateOptions()
    assert read_completion(completion()).sampling.max_tokens == 16


def test_null_means_absent_in_every_field() -> None:
    required = {"model", "messages", "prompt"}
    nulls = {f.name: None for f in CHAT_FIELDS if f.name not in required}
    assert read_chat(chat(**nulls)) == read_chat(chat())
    nulls = {f.name: None for f in COMPLETION_FIELDS if f.name not in required | {"max_tokens"}}
    assert read_completion(completion(**nulls)) == read_completion(completion())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1 << 63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 0, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a" * 1025]}, "stop[0]"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"50": 101}}, "logit_bias.50"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": None}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": json.loads("[" * 40 + "]" * 40)}}, "chat_template_kwargs"),
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"model": None}, "model"),
        ({"model": 1}, "model"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"surprise": 1}, "surprise"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*MESSAGES, {"role": "user", "content": ["x"]}]}, "messages[1].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat(**fields))
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 1025}, "logprobs"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_a_bad_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(completion(**fields), read_completion).param == param


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
        ("", [""]),
    ],
)
def test_prompts(prompt: Any, read: Any) -> None:
    assert read_completion(completion(prompt=prompt)).prompts == read


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"safety_identifier": "x", "prompt_cache_key": "y"},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto"},
        {"n": 1, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
    ],
)
def test_what_asks_nothing_changes_nothing(fields: dict[str, Any]) -> None:
    assert read_chat(chat(**fields)) == read_chat(chat())


def test_messages_are_read() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "tool_calls": None,
        },
        {"role": "user", "content": "", "name": "bob"},
    ]
    assert read_chat(chat(messages=messages)).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "", "name": "bob"},
    ]


def test_variables_for_the_chat_template() -> None:
    kwargs = read_chat(
        chat(verbosity="low", reasoning_effort="none", chat_template_kwargs={"a": 1})
    ).template.kwargs
    assert kwargs == {"verbosity": "low", "reasoning_effort": "none", "enable_thinking": False, "a": 1}
    for name, other in (("verbosity", "high"), ("reasoning_effort", "minimal")):
        assert refusal(chat(**{name: "low", "chat_template_kwargs": {name: other}})).param == name


def test_max_tokens_has_two_names() -> None:
    for fields in (
        {"max_tokens": 7},
        {"max_completion_tokens": 7},
        {"max_tokens": 9, "max_completion_tokens": 7},
        {"max_tokens": 5, "max_completion_tokens": 7},
    ):
        assert read_chat(chat(**fields)).sampling.max_tokens == 7


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1e30, "seed is 1e+30; it must be between -9223372036854775808 and 9223372036854775807"),
        (float(1 << 63), "seed is 9.223372036854776e+18; it must be between"),
        (10**400, "seed is 1000000000"),
        (True, "seed must be an integer, not true"),
        (1.5, "seed must be an integer, not 1.5"),
        ([None], "seed must be an integer, not [None]"),
    ],
)
def test_a_number_that_is_no_such_integer_is_told_as_it_came(value: Any, said: str) -> None:
    assert refusal(chat(seed=value)).message.startswith(said)
    assert read_chat(chat(seed=1.0)).sampling.seed == 1


def test_the_body_must_be_an_object() -> None:
    for body in ([], "x", 1, None, True):
        assert "object" in refusal(body).message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(st.sampled_from(CHAT_FIELDS), JSON)
def test_whatever_a_field_holds_it_is_read_or_refused(field: Any, value: Any) -> None:
    """Nothing a client sends raises anything but a 400 that names a field."""
    try:
        read_chat(chat(**{field.name: value}))
    except APIError as error:
        assert error.status == 400
        assert error.param is not None and error.param.startswith(field.name)


@given(st.dictionaries(st.text(max_size=10), JSON, max_size=3))
def test_unknown_fields_are_named(fields: dict[str, Any]) -> None:
    known = {f.name for f in CHAT_FIELDS}
    unknown = {k: v for k, v in fields.items() if k not in known and v is not None}
    if unknown:
        assert refusal(chat(**unknown)).param in unknown


def test_null_asks_for_nothing_whatever_the_field() -> None:
    stream_options = {"include_usage": None, "include_obfuscation": None}
    read_chat(chat(audio=None, prediction=None, stream=True, stream_options=stream_options))
    read_chat(chat(stream_options=stream_options))


def test_a_bad_value_is_shown_short_and_quickly() -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    for value in (["x" * 10_000_000] * 1000, {"a": [[]] * 3_000_000}, deep, "y" * 10_000_000, 10**4000):
        began = time.monotonic()
        assert len(shown(value)) <= SHOWN + 3
        assert time.monotonic() - began < 0.5


def test_every_field_says_what_it_means() -> None:
    for fields in (CHAT_FIELDS, COMPLETION_FIELDS):
        assert len({f.name for f in fields}) == len(fields)
        assert all(f.meaning and f.type.describe() for f in fields)
        assert field_table(fields).count("\n") == len(fields) + 2


def test_a_models_defaults_replace_the_declared_ones() -> None:
    rules = BodyRules({"temperature": 0.6, "top_k": 20})
    sampling = read_chat(chat(top_k=5, temperature=None), rules).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 5, 1.0)


def test_unknown_fields_may_be_passed_over() -> None:
    seen: list[str] = []
    assert read_chat(chat(odd=1), BodyRules(unknown=seen.append)) == read_chat(chat())
    assert seen == ["odd"]


def test_echo_asks_for_the_prompts_logprobs() -> None:
    options = read_completion(completion(echo=True, logprobs=2)).options
    assert (options.logprobs, options.prompt_logprobs) == (2, 2)
    options = read_completion(completion(echo=True)).options
    assert (options.logprobs, options.prompt_logprobs) == (-1, -1)


def test_a_chat_is_continued_without_a_new_opening() -> None:
    assert read_chat(chat(continue_final_message=True)).template == TemplateOptions(False, True)
    assert read_chat(chat(add_generation_prompt=False)).template == TemplateOptions(False, False)


def test_params_for_the_engine() -> None:
    params = Sampling(temperature=0.5, top_p=0.9, top_k=-1).params(7, (2, 3))
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 0)
    assert params.stop_token_ids == (2, 3)
    assert Sampling(ignore_eos=True).params(7, (2,)).stop_token_ids == ()
    assert Sampling(ignore_eos=True, stop_token_ids=(9,)).params(7, (2,)).stop_token_ids == (9,)
    assert Sampling(stop_token_ids=(9, 2)).params(7, (2,)).stop_token_ids == (2, 9)
    with pytest.raises(APIError, match="min_tokens"):
        Sampling(min_tokens=8).params(7, (2,))


def test_allowed_tokens_that_min_tokens_forbids_are_refused() -> None:
    assert Sampling(allowed_token_ids=(2, 3), min_tokens=1).params(7, (2,)).allowed_token_ids == (2, 3)
    assert Sampling(allowed_token_ids=(2,)).params(7, (2,)).allowed_token_ids == (2,)
    with pytest.raises(APIError, match="allowed_token_ids has stop tokens only, which min_tokens 1 forbids"):
        Sampling(allowed_token_ids=(2, 3), stop_token_ids=(3,), min_tokens=1).params(7, (2,))


def test_token_ids_outside_the_vocabulary_are_named() -> None:
    for name, sampling in (
        ("logit_bias", Sampling(logit_bias=((100, 1.0),))),
        ("allowed_token_ids", Sampling(allowed_token_ids=(99, 100))),
        ("stop_token_ids", Sampling(stop_token_ids=(100,))),
    ):
        sampling.check_tokens(101)
        with pytest.raises(APIError, match=f"{name} has 100; token IDs go from 0 to 99"):
            sampling.check_tokens(100)


def test_what_the_sdk_parsed_may_be_sent_back() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    calls = [{"id": "c", "type": "function", "function": function}]
    told = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "content": "hi"},
    ]
    parsed = function | {"parsed_arguments": {"a": 1}}
    again = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "parsed": {"b": 2},
            "tool_calls": [calls[0] | {"function": parsed}],
        },
        {"role": "user", "content": "hi"},
    ]
    read = [read_chat({"model": "demo", "messages": messages}).messages for messages in (told, again)]
    assert read[0] == read[1]
