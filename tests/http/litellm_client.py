"""LiteLLM as a client: run by test_clients.py in an environment that has it, with a server's URL and key.

Prints, as JSON, what each provider's way of asking gave.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS, "strict": True}}


def saying(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def ask(common: dict[str, Any]) -> dict[str, Any]:
    """Whole, streamed, with tools to the end, an object, and an error."""
    told: dict[str, Any] = {}
    whole = litellm.completion(messages=saying("Say hello."), **common)
    told["text"] = whole.choices[0].message.content
    told["finish"] = whole.choices[0].finish_reason
    told["tokens"] = whole.usage.prompt_tokens > 0 and whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(messages=saying("Say hello."), stream=True, **common))
    parts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    told["streamed"], told["pieces"] = "".join(part or "" for part in parts), len(chunks)

    asked = saying("The weather in Oslo and Bergen?")
    answer = litellm.completion(messages=asked, tools=[TOOL], **common).choices[0]
    told["calls"], told["calls_finish"] = calls(answer.message), answer.finish_reason
    stream = litellm.completion(messages=asked, tools=[TOOL], stream=True, **common)
    built = litellm.stream_chunk_builder(list(stream), messages=asked)
    told["streamed_calls"] = calls(built.choices[0].message)
    results = ("Bergen: 9 degrees", "Oslo: 12 degrees")
    for call, result in zip(answer.message.tool_calls, results, strict=True):
        asked = asked if answer.message in asked else [*asked, answer.message]
        asked = [*asked, {"role": "tool", "tool_call_id": call.id, "content": result}]
    told["after"] = litellm.completion(messages=asked, tools=[TOOL], **common).choices[0].message.content

    try:
        litellm.completion(
            messages=saying("x"), **common | {"model": common["model"].replace("demo", "none")}
        )
    except litellm.NotFoundError as error:
        told["error"] = "none" in str(error)
    return told


async def stream_of(common: dict[str, Any]) -> str:
    """As an asynchronous stream."""
    parts = []
    async for chunk in await litellm.acompletion(messages=saying("Say hello."), stream=True, **common):
        parts.append(chunk.choices[0].delta.content or "" if chunk.choices else "")
    return "".join(parts)


def main(url: str, key: str) -> None:
    told: dict[str, Any] = {}
    for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        common = {"model": f"{provider}/demo", "api_base": base, "api_key": key, "max_tokens": 100}
        told[provider] = ask(common | {"num_retries": 0})
        told[provider]["async"] = asyncio.run(stream_of(common))
        # Of Anthropic's API LiteLLM asks for a call with a name of its own, and gives its arguments.
        words = "by LiteLLM's call" if provider == "anthropic" else "as an object"
        place = litellm.completion(messages=saying(f"A place, {words}."), response_format=FORM, **common)
        told[provider]["object"] = json.loads(place.choices[0].message.content)
    common = {"api_base": f"{url}/v1", "api_key": key}
    legacy = litellm.text_completion(model="text-completion-openai/demo", prompt="Say hello.", **common)
    told["completions"] = legacy.choices[0].text
    response = litellm.responses(model="openai/demo", input="Say hello.", **common)
    told["responses"] = response.output[0].content[0].text
    vectors = litellm.embedding(model="hosted_vllm/demo", input=["hello", "x"], dimensions=8, **common).data
    told["embeddings"] = [len(vector["embedding"]) for vector in vectors]
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
