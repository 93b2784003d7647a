"""Every family on 2 and 4 tensor-parallel ranks computes, and answers, what one rank does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from servelite.config import SettingError, Settings
from servelite.ipc.messages import RunnerFacts, SamplingParams
from servelite.kernels.collective import ONE_RANK, Collective
from servelite.kernels.dispatch import REFERENCE
from servelite.layers.build import Build
from servelite.loader import weights
from servelite.loader.model import load_model
from servelite.models.base import CausalModel
from servelite.models.registry import ARCHITECTURES, build_model
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import load_tokenizer
from servelite.worker.load import load_runner
from tests.models.random_checkpoint import SIZES, random_checkpoint
from tests.paged_forward import paged_logits
from tests.rank_threads import ThreadRank, run_ranks
from tests.ties import Draw, Pair, compare_tokens, model_scorer
from tests.worker.driver import Driver, Request

FULL, SLIDING = "full_attention", "sliding_attention"
UNEQUAL = [SLIDING, SLIDING, SLIDING, FULL, *[SLIDING] * 4, FULL, *[SLIDING] * 4, FULL]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, biases, tied, as many KV heads": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 8},
    ),
    "mistral, window": ("MistralForCausalLM", {"sliding_window": 16, "num_key_value_heads": 4}),
    "qwen2, windows": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 13, "layer_types": [FULL, SLIDING, FULL]},
    ),
    "qwen3, biases": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "gemma3, one KV head": (
        "Gemma3ForCausalLM",
        {
            "num_key_value_heads": 1,
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3, unequal groups": (
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 14,
            "layer_types": UNEQUAL,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "attention_bias": True,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"sliding_window": None, "num_key_value_heads": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1], "norm_topk_prob": True}),
}
QUICK = {"llama, biases, tied, as many KV heads", "gemma3, one KV head", "qwen3_moe"}
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]
STEPS = {"whole": (70,), "chunks": (16, 16, 16, 16, 6), "decodes": (50, *[1] * 20)}
IDS = torch.randint(0, 257, (70,), generator=torch.Generator().manual_seed(3)).tolist()
SETTINGS = Settings(max_num_seqs=8, max_model_len=128, block_size=8, num_gpu_blocks_override=512)


class Made(NamedTuple):
    folder: Path
    model: CausalModel  # of one rank


pytestmark = pytest.mark.usefixtures("one_thread")  # these products are too small for two


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in VARIANTS],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    architecture, changes = VARIANTS[request.param]
    folder = random_checkpoint(tmp_path_factory.mktemp("tiny"), architecture, **changes)
    return Made(folder, load(folder))


def load(folder: Path, group: Collective = ONE_RANK) -> CausalModel:
    return load_model(open_model_files(folder), REFERENCE, group=group)


def test_every_family_has_a_variant() -> None:
    assert {architecture for architecture, _ in VARIANTS.values()} == set(ARCHITECTURES)
    assert set(VARIANTS) > QUICK


@pytest.mark.parametrize("ranks", RANKS)
def test_logits_equal_those_of_one_rank(made: Made, ranks: int) -> None:
    def run(group: Collective) -> list[torch.Tensor]:
        model = load(made.folder, group)
        return [paged_logits(model, IDS, sizes, block_size=8) for sizes in STEPS.values()]

    first, *others = run_ranks(ranks, run)
    for at, (name, sizes) in enumerate(STEPS.items()):
        expected = paged_logits(made.model, IDS, sizes, block_size=8)
        assert expected.std() > 1  # the comparison below would mean little on flat logits
        torch.testing.assert_close(first[at], expected, atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert all(torch.equal(first[at], other[at]) for other in others)


def test_a_rank_holds_its_part_of_each_weight(made: Made) -> None:
    """Two ranks have all of it, once: but for the router, norms, biases of sums, and a KV head for both."""
    whole = load_file(made.folder / "model.safetensors")
    held = [{slot.name: slot for slot in m.weights()} for m in run_ranks(2, lambda g: load(made.folder, g))]
    for name, tensor in whole.items():
        slots = [slots[name] for slots in held]
        parts = [slot.tensor - slot.offset for slot in slots]
        if slots[0].share is None or slots[0].share.size == slots[0].share.whole:
            assert all(torch.allclose(part, tensor, atol=1e-6) for part in parts)
        else:
            assert torch.equal(torch.cat(parts, dim=slots[0].dim), tensor)
    replicated = {name for name, slot in held[0].items() if slot.whole_shape == slot.tensor.shape}
    one_kv_head = made.model.kv_groups[0].num_kv_heads == 1
    for name in replicated:
        assert name.endswith(("norm.weight", "gate.weight", "o_proj.bias", "down_proj.bias")) or (
            one_kv_head and name.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"))
        )


def requests(kind: str) -> list[Request]:
    if kind == "greedy":
        greedy = SamplingParams(max_tokens=64, temperature=0.0)
        return [Request(IDS[:30], greedy), Request(IDS[40:45], greedy)]
    rules = {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": ((3, 4.0), (255, -2.0)),
        "bad_words": ((9,), (256,)),
    }
    return [
        Request(IDS[:11], SamplingParams(max_tokens=24, temperature=0.9), seed=5),
        Request(IDS[:20], SamplingParams(max_tokens=24, temperature=0.7, top_k=40, top_p=0.9), seed=6),
        Request(IDS[9:40], SamplingParams(max_tokens=24, temperature=1.1, **rules), seed=7, choice=2),
        Request(IDS[:7], SamplingParams(max_tokens=24, temperature=0.0, logprobs=4, prompt_logprobs=3)),
        Request(IDS[5:9], SamplingParams(max_tokens=24, temperature=0.0, **rules)),
    ]


def draw(request: Request) -> Draw:
    return Draw(request.sampling.temperature, request.seed, request.choice)


def logprobs(request: Request) -> list[float]:
    """Of the prompt's tokens and the answer's."""
    chosen = [part.chosen for part in (*request.prompt_logprobs, *request.logprobs)]
    assert bool(chosen) == (request.sampling.logprobs >= 0)
    return np.frombuffer(b"".join(chosen), "<f4").tolist()


class Answers(NamedTuple):
    facts: RunnerFacts
    requests: list[Request]


def answer(kind: str, folder: Path, group: Collective) -> Answers:
    runner = load_runner(SETTINGS, folder, group)
    asked = requests(kind)
    Driver(runner).run(asked, chunk=16)
    return Answers(runner.facts, asked)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["greedy", "mixed"])
def test_runners_on_ranks_answer_as_one_does(made: Made, kind: str, ranks: int) -> None:
    alone = answer(kind, made.folder, ONE_RANK)
    first, *others = run_ranks(ranks, lambda group: answer(kind, made.folder, group))
    for other in others:
        assert other.requests == first.requests  # tokens, flags and logprobs, to the bit
        assert replace(other.facts, ledger=()) == replace(first.facts, ledger=())
    pairs = [
        Pair(f"{kind}, {at}", one.prompt, one.output, other.output, draw(one))
        for at, (one, other) in enumerate(zip(alone.requests, first.requests, strict=True))
    ]
    print(compare_tokens(pairs, model_scorer(made.model)))
    assert not any(any(request.flags) for request in first.requests)
    for one, other in zip(alone.requests, first.requests, strict=True):
        if one.output == other.output:  # no tie in it
            np.testing.assert_allclose(logprobs(other), logprobs(one), atol=1e-3)


@pytest.mark.parametrize(
    ("ranks", "band", "row"), [(1, 48 * 50, 256), (3, 1 << 20, 0), (3, 48 * 50, 171), (3, 1, 256)]
)
def test_all_ranks_untie_a_head_that_differs_in_one_row(
    ranks: int, band: int, row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of 257 rows, of which the last of three ranks has the last 85; compared band by band."""
    monkeypatch.setattr(weights, "_BAND", band)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    random_checkpoint(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True, **heads)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def names(group: Collective) -> set[str]:
        return {slot.name for slot in load(tmp_path, group).weights()}

    save_file(tensors, file)
    assert all("lm_head.weight" not in each for each in run_ranks(ranks, names))
    tensors["lm_head.weight"][row, 47] += 1
    save_file(tensors, file)
    assert all("lm_head.weight" in each for each in run_ranks(ranks, names))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_family_refuses_what_it_cannot_divide(architecture: str) -> None:
    """Before there is any weight: a rank alone finds out."""

    def build(ranks: int, **changes: Any) -> CausalModel:
        return build_model(architecture, SIZES | changes, Build(REFERENCE, group=ThreadRank(0, ranks)))

    build(4)
    with pytest.raises(SettingError, match=r"^--tp is 3, .* num_attention_heads 8; it can be 1, 2, 4 or 8$"):
        build(3)
    with pytest.raises(SettingError, match="nor a multiple of the model's num_key_value_heads 6; it can be"):
        build(4, num_attention_heads=12, num_key_value_heads=6)
    with pytest.raises(SettingError, match=r"vocab_size 3; it can be 1 or 2$"):
        build(4, vocab_size=3)
    inner = "moe_intermediate_size" if architecture == "Qwen3MoeForCausalLM" else "intermediate_size"
    with pytest.raises(SettingError, match=f"^--tp is 4, .* {inner} 42; it can be 1 or 2$"):
        build(4, **{inner: 42})


REAL = [
    pytest.param("demo_model", 3, id="demo, 9 heads and 3 KV heads on 3 ranks"),
    pytest.param("gemma_model", 2, id="gemma, one KV head on 2 ranks"),
]
TEXTS = ("The capital of France is", "Once upon a time there was a dragon who", "1, 1, 2, 3, 5, 8,")


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "ranks"), REAL)
def test_a_real_model_on_ranks_answers_as_on_one(
    model: str, ranks: int, request: pytest.FixtureRequest
) -> None:
    files = open_model_files(request.getfixturevalue(model))
    tokenizer = load_tokenizer(files)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    settings = Settings(max_num_seqs=8, max_model_len=256, num_gpu_blocks_override=200)

    def run(group: Collective) -> tuple[torch.Tensor, list[Request]]:
        logits = paged_logits(load_model(files, REFERENCE, group=group), prompts[1], (5, len(prompts[1]) - 5))
        asked = [Request(ids, SamplingParams(max_tokens=32, temperature=0.0)) for ids in prompts]
        asked += [Request(ids, SamplingParams(max_tokens=32, temperature=0.8), seed=3) for ids in prompts]
        Driver(load_runner(settings, files.path, group)).run(asked, chunk=64)
        return logits, asked

    expected, alone = run(ONE_RANK)
    (logits, first), *others = run_ranks(ranks, run)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert all(other == first for _, other in others)
    pairs = [
        Pair(f"{at}", one.prompt, one.output, other.output, draw(one))
        for at, (one, other) in enumerate(zip(alone, first, strict=True))
    ]
    print(compare_tokens(pairs, model_scorer(load_model(files, REFERENCE))))


def test_only_the_sizes_that_a_model_has_are_asked_for() -> None:
    """Of layers with experts alone, or with none."""
    for dense, other in (([], "intermediate_size"), ([0, 1, 2], "moe_intermediate_size")):
        config = SIZES | {"mlp_only_layers": dense, other: 41}
        build_model("Qwen3MoeForCausalLM", config, Build(REFERENCE, group=ThreadRank(0, 4)))
