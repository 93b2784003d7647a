"""The simulated runner: tokens depend on all a model's would and on nothing else; scripts; masks; time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from servelite.config import SettingError, Settings
from servelite.ipc.masks import pack_masks
from servelite.ipc.messages import KVGroup, NewRow, Plan, RunnerFacts, SamplingParams, pack, unpack
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import load_tokenizer
from servelite.worker.base import StepGapError
from servelite.worker.simulated import CostModel, Script, SimulatedRunner, load_script

FACTS = RunnerFacts(16, 4, 64, 1000, (KVGroup("full", (0,), 32),), "none", "none")


def plan(
    step: int, count: int, logits: int, blocks: list[int], new: NewRow | None = None, copies: bytes = b""
) -> Plan:
    return Plan(
        1, step, rows=pack([0]), generations=pack([1]), num_tokens=pack([count]), num_drafts=b"",
        num_logits=pack([logits]), block_counts=pack([len(blocks)]), block_ids=pack(blocks),
        new_rows=(new,) if new else (), copies=copies,
    )  # fmt: skip


def new_row(tokens: list[int], *, seed: int = 1, choice: int = 0, temperature: float = 1.0) -> NewRow:
    return NewRow(
        0, 1, pack(tokens), len(tokens), 0, seed, choice, SamplingParams(9, temperature=temperature)
    )


def first_token(tokens: list[int], blocks: list[int] | None = None, **fields: object) -> int:
    runner = SimulatedRunner(FACTS, 1, verify=True)
    step = plan(1, len(tokens), 1, blocks or [3, 1], new_row(tokens, **fields))  # type: ignore[arg-type]
    runner.forward(step)
    return int(unpack(runner.sample(step, None).tokens)[0])


def test_a_token_depends_on_history_seed_and_choice_and_not_on_where_its_blocks_lie() -> None:
    base = first_token([1, 2, 3, 4, 5])
    assert first_token([1, 2, 3, 4, 5], blocks=[9, 0]) == base
    others = [
        first_token([2, 1, 3, 4, 5]),
        first_token([1, 2, 3, 4, 6]),
        first_token([1, 2, 3, 4, 5], seed=2),
        first_token([1, 2, 3, 4, 5], choice=1),
        first_token([1, 2, 3, 4, 5], temperature=0.0),
    ]
    assert base not in others and len(set(others)) == len(others)
    greedy = {first_token([1, 2, 3], seed=s, temperature=0.0) for s in range(5)}
    assert len(greedy) == 1


def test_a_wrong_block_gives_another_token_and_is_found_when_verifying() -> None:
    tokens = [1, 2, 3, 4, 5]
    runner = SimulatedRunner(FACTS, 1)
    runner.forward(plan(1, 5, 0, [3, 1], new_row([*tokens, 6])))
    runner._tables[0, 0, 1] = 7  # a manager that mixed up blocks
    step = plan(2, 1, 1, [])
    runner.forward(step)
    assert int(unpack(runner.sample(step, None).tokens)[0]) != first_token([*tokens, 6])
    careful = SimulatedRunner(FACTS, 1, verify=True)
    careful.forward(plan(1, 5, 0, [3, 1], new_row([*tokens, 6])))
    careful._tables[0, 0, 0] = 7
    with pytest.raises(AssertionError, match="KV cache"):
        careful.forward(plan(2, 1, 1, []))


def test_copied_blocks_hold_what_their_source_holds() -> None:
    runner = SimulatedRunner(FACTS, 1)
    runner.forward(plan(1, 5, 0, [3, 1], new_row([1, 2, 3, 4, 5, 6])))
    runner._tables[0, 0, 1] = 7
    step = plan(2, 1, 1, [], copies=pack([1, 7]))
    runner.forward(step)
    assert int(unpack(runner.sample(step, None).tokens)[0]) == first_token([1, 2, 3, 4, 5, 6])


def test_a_gap_between_steps_stops_it() -> None:
    runner = SimulatedRunner(FACTS, 1)
    runner.forward(plan(5, 2, 0, [0], new_row([1, 2, 3, 4])))
    with pytest.raises(StepGapError):
        runner.forward(plan(7, 1, 0, []))


def test_masks_are_honoured() -> None:
    runner = SimulatedRunner(FACTS, 1)
    step = plan(1, 3, 1, [0], new_row([1, 2, 3]))
    runner.forward(step)
    words = np.zeros((1, 32), np.uint32)
    words[0, [17 // 32, 999 // 32]] = 1 << 17 % 32, 1 << 999 % 32
    result = runner.sample(step, pack_masks(np.zeros(1, np.int32), words))
    assert unpack(result.tokens)[0] in (17, 999)


def test_a_step_takes_the_time_of_its_cost_model() -> None:
    runner = SimulatedRunner(FACTS, 1, cost=CostModel(0.05, 0.0, 0.0))
    step = plan(1, 3, 1, [0], new_row([1, 2, 3]))
    started = time.monotonic()
    runner.forward(step)
    runner.sample(step, None)
    assert 0.05 <= time.monotonic() - started < 0.25
    assert CostModel().seconds(8192, 0) > CostModel().seconds(1, 0) > 0.004
    assert CostModel().seconds(1, 100_000) > CostModel().seconds(1, 100)


def test_a_script_answers_by_whole_prompt_then_by_the_last_message_found() -> None:
    answers = {"a": (1,), "ab": (2,), "b": (3,)}
    script = Script(answers, lambda ids: "".join(chr(i) for i in ids), end_token=9)

    def answer(text: str) -> tuple[int, ...]:
        return script.answer_to(np.array([ord(c) for c in text]))

    assert answer("a") == (1, 9)
    assert answer("<a><ab>") == (2, 9), "the longest of those that end last"
    assert answer("<ab><a>") == (1, 9)
    assert answer("xyz") == ()


def test_a_script_through_the_real_tokenizer(tmp_path: Path, demo_model: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(json.dumps({"prompt": "ping", "text": "pong 🏓"}) + "\n\n")
    settings = Settings(model="demo", executor="simulated", simulated_script=str(path), max_model_len=100_000)
    runner = SimulatedRunner.from_settings(settings, demo_model)
    assert runner.facts.max_model_len == 100_000
    tokenizer = load_tokenizer(open_model_files(demo_model))
    prompt = tokenizer.encode("say ping", add_special_tokens=False)
    step = plan(1, len(prompt), 1, [0], new_row(prompt))
    runner.forward(step)
    got = [int(unpack(runner.sample(step, None).tokens)[0])]
    for at in range(2, 20):
        step = plan(at, 1, 1, [at] if (len(prompt) + at - 2) % 16 == 0 else [])
        runner.forward(step)
        got.append(int(unpack(runner.sample(step, None).tokens)[0]))
        if got[-1] in tokenizer.eos_token_ids:
            break
    assert tokenizer.decode(got) == "pong 🏓"
    assert got[-1] in tokenizer.eos_token_ids


@pytest.mark.parametrize(
    "line", ["not json", "[]", '{"prompt": "x"}', '{"prompt": "x", "text": 3}', '"text"']
)
def test_a_bad_script_is_refused_by_its_line(tmp_path: Path, demo_model: Path, line: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"prompt": "a", "text": "b"}\n' + line + "\n")
    with pytest.raises(SettingError, match="line 2"):
        load_script(str(path), load_tokenizer(open_model_files(demo_model)))
    with pytest.raises(SettingError, match="none"):
        load_script(str(tmp_path / "none"), load_tokenizer(open_model_files(demo_model)))


def test_a_long_step_shows_signs_of_life() -> None:
    beats: list[float] = []
    runner = SimulatedRunner(FACTS, 1, cost=CostModel(1.2, 0.0, 0.0))
    runner.watch(lambda: beats.append(time.monotonic()))
    step = plan(1, 3, 1, [3], new_row([5, 6, 7]))
    runner.forward(step)
    runner.sample(step, None)
    assert len(beats) >= 3
