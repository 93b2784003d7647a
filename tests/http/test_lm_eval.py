"""lm-eval over HTTP scores the demo model as it does with transformers in its own process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.http.server import running_server
from tests.models.oracle import load_llama
from tests.tokenizer.oracle import load_oracle
from tests.tool_environment import python_with

LM_EVAL = ("lm-eval==0.4.13", "tenacity==9.2.1", "accelerate==1.15.0")
CLOSE = 1e-3  # of a log-likelihood

CAPITALS = (
    "Paris", "France", "Rome", "Italy", "Tokyo", "Japan", "Cairo", "Egypt", "Madrid", "Spain",
    "Berlin", "Germany", "Moscow", "Russia", "Beijing", "China", "Athens", "Greece", "Nairobi", "Kenya",
)  # fmt: skip
ASKING = (
    "The capital of {} is",
    "Question: What is the capital of {}?\nAnswer:",
    "{}'s capital city is called",
    "On the way to {} we saw its capital,",
    "1.  {}:",
)
SENTENCES = (
    "Once upon a time, there was a little girl who lived in a small",
    "The quick brown fox jumps over the lazy",
    "Water boils at a temperature of 100",
    "  def add(a, b):\n    return a +",
    "Monday, Tuesday, Wednesday, Thursday,",
    "Ein Kaffee kostet 3 Euro, zwei Kaffee kosten",
    "The sun rises in the east and sets in the",
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
)
CONTINUED = (" village.", " dog.", " degrees.", " b\n", " Friday.", " 6 Euro.", " west.", " 10")


def _task(folder: Path, name: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """A task of lm-eval: its rows, and its YAML, which JSON is."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test"} | source | settings))


def _tasks(folder: Path) -> None:
    folder.mkdir()
    pairs = list(zip(CAPITALS[::2], CAPITALS[1::2], strict=True))
    choices = []
    for number in range(50):
        capital, country = pairs[number % 10]
        wrong = pairs[(number + 1 + number // 10) % 10][0]
        text = ASKING[number // 10].format(country)
        choices.append({"text": text, "choices": [[capital, wrong], [wrong, capital]][number % 2]})
        choices[-1]["right"] = number % 2
    metric = {"aggregation": "mean", "higher_is_better": True}
    asked = {"doc_to_text": "text", "doc_to_choice": "choices", "doc_to_target": "right"}
    kind = {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"} | metric]}
    _task(folder, "capitals", choices, asked | kind)
    rows = [{"text": text, "next": more} for text, more in zip(SENTENCES, CONTINUED, strict=True)]
    asked = {"doc_to_text": "text", "doc_to_target": "{{next}}", "target_delimiter": ""}
    kind = {"output_type": "loglikelihood", "metric_list": [{"metric": "acc"} | metric]}
    _task(folder, "sentences", rows, asked | kind)


def _scores(python: Path, folder: Path, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """By task: its accuracy, and each document's log-likelihoods."""
    out = folder / kind
    command = [python, "-m", "lm_eval", "run", "--tasks", "capitals", "sentences", "--model", kind]
    command += ["--include_path", folder / "tasks", "--output_path", out, "--log_samples"]
    command += [
        "--batch_size",
        "4",
        "--model_args",
        ",".join(f"{name}={value}" for name, value in arguments.items()),
    ]
    own = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    own |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, cwd=folder, env=os.environ | own
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = out.glob("*/results_*.json")
    found = {}
    for task, told in json.loads(results.read_text())["results"].items():
        (samples,) = out.glob(f"*/samples_{task}_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        numbers = [float(pair[0]) for row in rows for pair in _pairs(row["filtered_resps"])]
        found[task] = told["acc,none"], numbers
    return found


def _pairs(answers: list[Any]) -> list[Any]:
    """(log-likelihood, whether it is the greedy one) of each of a document's requests."""
    return answers if isinstance(answers[0], list) else [answers]


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(1200)
def test_scores_are_those_of_transformers(tmp_path: Path, demo_model: Path) -> None:
    python, model = python_with(*LM_EVAL), tmp_path / "demo"
    load_llama(demo_model).save_pretrained(model)
    load_oracle(demo_model).save_pretrained(model)
    _tasks(tmp_path / "tasks")
    with running_server(tmp_path, "--dtype", "float32", "--max-model-len", "512") as server:
        told = {"model": "demo", "base_url": f"{server.url}/v1/completions", "num_concurrent": 4}
        told |= {"tokenizer": model, "tokenizer_backend": "huggingface"}
        ours = _scores(python, tmp_path, "local-completions", told)
    theirs = _scores(python, tmp_path, "hf", {"pretrained": model, "dtype": "float32"})
    assert {task: len(numbers) for task, (_, numbers) in ours.items()} == {"capitals": 100, "sentences": 8}
    for task, (accuracy, numbers) in theirs.items():
        assert ours[task][0] == accuracy
        assert ours[task][1] == pytest.approx(numbers, abs=CLOSE)
    assert 0.5 < theirs["capitals"][0] < 1 and 0 < theirs["sentences"][0] < 1
