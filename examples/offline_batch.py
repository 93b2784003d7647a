"""A batch without a server: prompts in, JSON lines out. The model runs in a child process of this one."""

import json

from servelite import LLM

prompts = [f"The capital of {country} is" for country in ("France", "Germany", "Italy")]

with LLM("demo", max_model_len=512) as llm:
    for prompt, answer in zip(prompts, llm.generate(prompts, temperature=0, max_tokens=8), strict=True):
        print(json.dumps({"prompt": prompt, "text": answer.text, "finish_reason": answer.finish_reason}))
