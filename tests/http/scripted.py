"""A server whose answers are known: calls of a weather function, what follows their results, an object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.http.server import Server, running_server

KEY = "a-key"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s", "days": 2}}\n</tool_call>'
PLACE = '{"city": "Oslo", "days": 3}'
PLACES = '{"elements": [{"city": "Oslo", "days": 3}, {"city": "Bergen", "days": 1}]}'
JSON_CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
SCRIPT = {
    "Say hello.": "Hello to you, Jürgen 🙂.",
    "The weather in Oslo?": "Let me look.\n\n" + CALL % "Oslo",
    "The weather in Oslo and Bergen?": CALL % "Oslo" + "\n" + CALL % "Bergen",
    "Oslo: 12 degrees": "It is 12 degrees in Oslo.",
    "Bergen: 9 degrees": "It rains in Bergen.",
    "A place, as an object.": PLACE,
    "A place, as an object. By a call.": JSON_CALL % ("json", PLACE),
    "A place, by LiteLLM's call.": JSON_CALL % ("json_tool_call", PLACE),
    "Places, as objects.": PLACES,
    "Places, as objects. By a call.": JSON_CALL % ("json", PLACES),
}


@contextmanager
def scripted_server(folder: Path) -> Iterator[Server]:
    """The demo model's tokenizer and template, the script's answers; KEY opens it."""
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps({"prompt": k, "text": v}) + "\n" for k, v in SCRIPT.items()))
    flags = ("--executor", "simulated", "--simulated-step-ms", "1", "--simulated-script", str(script))
    with running_server(folder, *flags, "--tool-call-parser", "hermes", "--api-key", KEY) as server:
        yield server
