"""The demo model's greedy tokens equal those of transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from servelite.config import Settings
from servelite.ipc.messages import SamplingParams
from servelite.kernels.dispatch import REFERENCE
from servelite.loader.model import load_model
from servelite.tokenizer.chat_template import ChatTemplate
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import load_tokenizer
from servelite.worker.load import load_runner
from tests.models.oracle import greedy_answers
from tests.ties import Pair, compare_tokens, model_scorer
from tests.worker.driver import Driver, Request

PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences what photosynthesis is.",
    "List five fruits, numbered.",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet, and when?",
    "Tell me a story about a dragon who was afraid of fire.",
    "Was ist die Hauptstadt von Deutschland? 🇩🇪",
    "Summarise: The quick brown fox jumps over the lazy dog. " * 12,
)
TOKENS = 64


@pytest.mark.real_model
@pytest.mark.timeout(400)
def test_ten_chat_prompts_of_64_tokens(demo_model: Path) -> None:
    files = open_model_files(demo_model)
    tokenizer = load_tokenizer(files)
    assert files.chat_template is not None
    template = ChatTemplate(
        files.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=[tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.special_ids],
    )
    rendered = [template.render([{"role": "user", "content": text}]) for text in PROMPTS]
    prompts = [tokenizer.encode_rendered(each.text, each.controls) for each in rendered]
    expected = greedy_answers(demo_model, prompts, TOKENS)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, stop_token_ids=files.eos_token_ids)
    runner = load_runner(Settings(max_num_seqs=16, max_model_len=512), demo_model)
    got = Driver(runner).run([Request(prompt, sampling) for prompt in prompts], chunk=64)
    assert tokenizer.decode(got[0]) == "The capital of France is Paris."
    pairs = [Pair(*four) for four in zip(PROMPTS, prompts, expected, got, strict=True)]
    report = compare_tokens(pairs, model_scorer(load_model(files, REFERENCE)))
    assert report.tokens > 300
