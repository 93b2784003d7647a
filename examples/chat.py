"""A chat with the OpenAI SDK (`pip install openai`): ask, then ask on with the answer as context."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SERVELITE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVELITE_KEY", "none"),  # one of the server's --api-key, if it has any
)

messages = [{"role": "user", "content": "What is the capital of France?"}]
answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
print(answer.choices[0].message.content)

messages += [answer.choices[0].message, {"role": "user", "content": "And of Germany?"}]
answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=40)
print(answer.choices[0].message.content)
print(f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out")
