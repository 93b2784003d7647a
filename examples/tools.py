"""A function that the model calls (`pip install openai`): the call, its result, the answer that uses it."""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SERVELITE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVELITE_KEY", "none"),  # one of the server's --api-key, if it has any
)


def get_temperature(city: str) -> str:
    """What the model may ask for."""
    return {"Oslo": "9 degrees", "Paris": "18 degrees"}.get(city, "unknown")


tool = {
    "type": "function",
    "function": {
        "name": "get_temperature",
        "description": "The temperature in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
messages = [{"role": "user", "content": "What is the temperature in Paris?"}]
# "required" makes any model call, and its arguments follow the schema; "auto" leaves it to the model.
asked = {"model": "demo", "temperature": 0, "tools": [tool]}
answer = client.chat.completions.create(
    messages=messages, tool_choice="required", parallel_tool_calls=False, max_tokens=60, **asked
)
messages.append(answer.choices[0].message)
for call in answer.choices[0].message.tool_calls:
    result = get_temperature(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}): {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

answer = client.chat.completions.create(messages=messages, tool_choice="none", max_tokens=60, **asked)
print(answer.choices[0].message.content)
