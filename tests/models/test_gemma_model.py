"""Gemma 3 270M, a real model with windows: its greedy tokens equal those of transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from servelite.config import Settings
from servelite.ipc.messages import SamplingParams
from servelite.kernels.dispatch import REFERENCE
from servelite.loader.model import load_model
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import load_tokenizer
from servelite.worker.load import load_runner
from tests.models.gemma_folder import gemma_folder, load_gemma
from tests.models.oracle import greedy_answers
from tests.ties import Pair, compare_tokens, model_scorer
from tests.worker.driver import Driver, Request

# It is a base model: texts to go on with. Two are longer than its window of 512 tokens.
PROMPTS = (
    "What is the capital of France?",
    "The quick brown fox jumps over the lazy dog, and then",
    "Once upon a time there was a dragon who was afraid of fire.",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "日本の首都は",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n",
    "The sea was calm that morning, and the fishermen went out before dawn. " * 45,
    "\n".join(f"{number}. Item number {number} of the list" for number in range(1, 80)),
)
TOKENS = 64

pytestmark = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.timeout(1500)]


def test_ten_prompts_of_64_tokens(gemma_model: Path) -> None:
    files = open_model_files(gemma_model)
    tokenizer = load_tokenizer(files)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]
    assert sum(len(prompt) > 512 for prompt in prompts) == 2
    expected = greedy_answers(gemma_model, prompts, TOKENS, load_gemma)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, stop_token_ids=files.eos_token_ids)
    settings = Settings(max_num_seqs=16, max_model_len=2048, kv_cache_memory_bytes=1 << 30)
    got = Driver(load_runner(settings, gemma_model)).run(
        [Request(prompt, sampling) for prompt in prompts], chunk=64
    )
    assert tokenizer.decode(got[0]).startswith("\n\nThe capital of France is Paris.")
    pairs = [Pair(*four) for four in zip(PROMPTS, prompts, expected, got, strict=True)]
    report = compare_tokens(pairs, model_scorer(load_model(files, REFERENCE)))
    assert report.tokens > 500


def test_the_hugging_face_folder_gives_the_same_weights(gemma_model: Path) -> None:
    """transformers' folder in float32, in shards, against the GGUF file: bit for bit."""
    from_gguf = load_model(open_model_files(gemma_model), REFERENCE)
    from_folder = load_model(open_model_files(gemma_folder(gemma_model)), REFERENCE)
    folders = {slot.name: slot.tensor for slot in from_folder.weights()}
    for slot in from_gguf.weights():
        assert torch.equal(folders.pop(slot.name), slot.tensor), slot.name
    assert not folders
