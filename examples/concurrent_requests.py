"""Many requests at once with the async OpenAI SDK: the server batches them by itself."""

import asyncio
import os

from openai import AsyncOpenAI

client = AsyncOpenAI(
    base_url=os.environ.get("SERVELITE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVELITE_KEY", "none"),
    max_retries=5,  # a full server answers 503 with Retry-After, which the SDK obeys
)


async def ask(country: str) -> str:
    answer = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
        temperature=0,
        max_tokens=30,
    )
    return f"{country}: {answer.choices[0].message.content}"


async def main() -> None:
    countries = ["France", "Germany", "Japan"]
    for line in await asyncio.gather(*map(ask, countries)):
        print(line)


asyncio.run(main())
