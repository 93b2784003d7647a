"""`thinking_token_budget` and Anthropic's, against a model with tokens for the ends of its reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from servelite.tokenizer.gguf import read_gguf
from servelite.tokenizer.gguf_tokenizer import build_tokenizer
from tests.http.server import Server, running_server

NAMES = {"<repo_name>": "<think>", "<file_sep>": "</think>"}  # tokens of the demo model that nobody needs
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not open %}{% else %}<think>{% endif %}"
SCRIPT = {
    "Think.": "<think>one two three four five six seven eight</think>Done.",
    "Inside.": "Hm. " * 40,
    "Plain.": "No.",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("thinking")
    text = build_tokenizer(read_gguf(demo_model)).to_str()
    for old, new in NAMES.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    backend = json.loads(text)
    for token in backend["added_tokens"]:
        token["special"] = token["content"] not in NAMES.values()
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "script.jsonl").write_text(
        "".join(json.dumps({"prompt": key, "text": value}) + "\n" for key, value in SCRIPT.items())
    )
    flags = ("--executor", "simulated", "--simulated-step-ms", "1", "--tokenizer", str(folder))
    more = ("--chat-template", "template.jinja", "--simulated-script", "script.jsonl")
    with running_server(
        folder, *flags, *more[:1], str(folder / more[1]), more[2], str(folder / more[3])
    ) as it:
        yield it


def choice(server: Server, text: str, **fields: object) -> tuple[str, str | None]:
    """(reasoning, content) of an answer."""
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 30, **fields}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    return message.get("reasoning_content") or "", message["content"]


def test_a_budget_ends_the_reasoning(server: Server) -> None:
    assert choice(server, "Think.") == ("one two three four five six seven eight", "Done.")
    assert choice(server, "Think.", thinking_token_budget=50)[0].endswith("eight")
    for budget in (1, 3):
        thought, rest = choice(server, "Think.", thinking_token_budget=budget)
        assert thought == " ".join(["one", "two", "three"][:budget]) and rest
    thought, rest = choice(
        server, "Inside.", thinking_token_budget=4, chat_template_kwargs={"open": True}, n=1
    )
    assert thought == "Hm. H" and rest and "Hm. Hm." in rest  # 4 tokens; the script has gone on
    told = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "f", "schema": told | {"additionalProperties": False}},
    }
    thought, rest = choice(
        server, "Think.", thinking_token_budget=2, response_format=form, max_tokens=300, seed=1
    )
    assert thought == "one two" and json.loads(rest or "") == {"a": 1}


def test_anthropics_budget(server: Server) -> None:
    body = {
        "model": "demo",
        "max_tokens": 1500,
        "messages": [{"role": "user", "content": "Inside."}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "chat_template_kwargs": {"open": True},
        "ignore_eos": True,
    }
    status, answer = server.post("/v1/messages", body)
    assert status == 200, answer
    assert answer["content"][0]["type"] == "thinking" and answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["thinking"] and answer["usage"]["output_tokens"] == 1500


def reasoning_tokens(server: Server, text: str, **fields: object) -> set[int]:
    """By the usage of an answer, whole and streamed."""
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}
    counts = {
        server.post("/v1/chat/completions", body)[1]["usage"]["completion_tokens_details"]["reasoning_tokens"]
    }
    connection = server.connect()
    try:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        *_, last, _ = connection.getresponse().read().decode().strip().split("\n\n")
    finally:
        connection.close()
    usage = json.loads(last.removeprefix("data: "))["usage"]
    return counts | {usage["completion_tokens_details"]["reasoning_tokens"]}


def test_reasoning_is_counted(server: Server) -> None:
    assert reasoning_tokens(server, "Think.") == {10}  # its opening and its end are tokens as well
    assert reasoning_tokens(server, "Think.", max_tokens=6) == {6}
    assert reasoning_tokens(server, "Think.", thinking_token_budget=3, max_tokens=20) == {5}
    assert reasoning_tokens(server, "Plain.") == {0}
    fields = {"chat_template_kwargs": {"open": True}, "thinking_token_budget": 4, "max_tokens": 20}
    assert reasoning_tokens(server, "Inside.", **fields) == {5}
    body = {"model": "demo", "max_tokens": 50, "messages": [{"role": "user", "content": "Think."}]}
    usage = server.post("/v1/messages", body)[1]["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": 10}
    usage = server.post("/v1/responses", {"model": "demo", "input": "Think."})[1]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 10}


def test_bad_budgets(server: Server) -> None:
    for budget in (-1, "3", 1.5, True):
        body = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
        status, answer = server.post("/v1/chat/completions", body | {"thinking_token_budget": budget})
        assert status == 400 and answer["error"]["param"] == "thinking_token_budget"
