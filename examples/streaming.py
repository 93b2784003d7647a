"""A streamed answer with the OpenAI SDK (`pip install openai`): each piece is shown as it comes."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SERVELITE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVELITE_KEY", "none"),
)

stream = client.chat.completions.create(
    model="demo",
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:  # the last chunk, which has no choices
        print(f"\n{chunk.usage.completion_tokens} tokens")
