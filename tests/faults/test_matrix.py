"""Each fault against requests in every state at once: waiting, parked, prefilling, decoding, preempted.

On the simulated runner, alone and in ranks. What a client sees is as `docs/faults.md` says, and after it
all blocks are free.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.streams import CHAT, COMPLETIONS, Told, stream
from tests.faults.test_engine_death import wait_until_ready
from tests.http.server import Server, running_server

MARK = 31337
# 40 blocks of 16 tokens, four rows, 32 tokens a step: prompts take many steps, and answers preempt others.
FLAGS = (
    *("--executor", "simulated", "--simulated-step-ms", "5", "--max-num-seqs", "4", "--debug"),
    *("--max-num-batched-tokens", "32", "--num-gpu-blocks-override", "40", "--max-model-len", "400"),
    *("--reasoning-parser", "qwen3"),
)
WORDS = "eins zwei drei vier fünf sechs sieben acht neun zehn"
ARGUMENTS = json.dumps({"text": f"{WORDS} 東京 😀", "n": [1, {"m": "2"}]}, ensure_ascii=False)
OBJECT = json.dumps({"text": f"{WORDS} 東京 {WORDS} 😀", "n": [1, {"m": "2"}]}, ensure_ascii=False)
CALL = f'<tool_call>\n{{"name": "write", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "<think>\nThis needs a tool.\n</think>\n\n"
SCRIPT = {
    "Write it.": f"{THOUGHT}Let me.\n{CALL}\n{CALL}",
    "Only it.": THOUGHT + CALL,
    "Data.": THOUGHT + OBJECT,
}
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "n": {"type": "array"}},
    "required": ["text", "n"],
    "additionalProperties": False,
}
FUNCTION = {"name": "write", "parameters": SCHEMA}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "write"}}, "parallel_tool_calls": False}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}

Asked = tuple[str, dict[str, Any]]
"""A path and a body."""


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}


def read() -> list[Asked]:
    """Chats whose answers are read by a parser, follow a grammar, or both, in every API; scripted."""
    responses = {"model": "demo", "input": "Write it.", "tools": [{"type": "function", **FUNCTION}]}
    messages = chat("Write it.", max_tokens=200, tools=[{"name": "write", "input_schema": SCHEMA}])
    return [
        (CHAT, chat("Write it.", **TOOLS, n=2)),
        (CHAT, chat("Only it.", **TOOLS, **NAMED)),
        (CHAT, chat("Data.", **FORMAT)),
        ("/v1/responses", responses),
        ("/v1/messages", messages),
    ]


def asked() -> list[Asked]:
    """Those of `read`, after one that is marked; then short and long prompts, one with two choices, one that
    follows a grammar: more of them than rows."""
    common = {"model": "demo", "ignore_eos": True, "temperature": 1}
    long = [{"prompt": [number] * 200, "max_tokens": 120} for number in range(1, 4)]
    short = [{"prompt": [number] * 10, "max_tokens": 150} for number in range(10, 15)]
    marked = [{"prompt": [5, MARK, 6], "max_tokens": 150}]
    twice = [{"prompt": [20] * 150, "max_tokens": 40, "n": 2}]
    bound = [{"prompt": [30] * 10, "max_tokens": 150, "structured_outputs": {"regex": "[a-z ]{200,}"}}]
    all_of_them = enumerate([*marked, *short[:2], *long, *twice, *short, *bound])
    first, *others = [(COMPLETIONS, common | each | {"seed": seed}) for seed, each in all_of_them]
    return [first, *read(), *others]


def flags(folder: Path) -> tuple[str, ...]:
    """Those of a server that knows the script."""
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps({"prompt": k, "text": v}) + "\n" for k, v in SCRIPT.items()))
    return (*FLAGS, "--simulated-script", str(script))


async def everybody(server: Server, prompt_tokens: float) -> list[asyncio.Task[Told]]:
    """All requests under way, of a fresh server: all are accepted, some wait, some run, and somebody has been
    preempted."""
    tasks = [asyncio.create_task(stream(server.port, body, path=path)) for path, body in asked()]
    deadline = time.monotonic() + 30
    while True:
        now = await asyncio.to_thread(server.metrics)
        accepted = now["servelite_prompt_tokens_total"] == prompt_tokens
        if accepted and now["servelite_num_preemptions_total"] and now["servelite_num_requests_waiting"]:
            return tasks
        assert time.monotonic() < deadline and not all(task.done() for task in tasks), now
        await asyncio.sleep(0.01)


def only(told: Told) -> tuple[Any, ...]:
    """What must not change. Which of the prompt's tokens were cached may, and how choices are interleaved."""
    usage = None if told.usage is None else told.usage["completion_tokens"]
    return told.parts, sorted(told.token_ids), told.finish_reason, usage, told.error, told.done


async def all_of(server: Server, which: slice = slice(None)) -> list[Told]:
    return await asyncio.gather(*(stream(server.port, body, path=path) for path, body in asked()[which]))


@pytest.fixture(scope="module")
def undisturbed(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[tuple[Any, ...]], float]:
    """Everybody's answers, by one rank; and how many tokens their prompts have."""
    folder = tmp_path_factory.mktemp("quiet")
    with running_server(folder, *flags(folder)) as server:
        answers = [only(told) for told in asyncio.run(all_of(server))]
        prompt_tokens = server.metrics()["servelite_prompt_tokens_total"]
    check_what_is_read([parts for parts, *_ in answers[1 : 1 + len(read())]])
    return answers, prompt_tokens


@pytest.fixture(scope="module")
def quiet(undisturbed: tuple[list[tuple[Any, ...]], float]) -> list[tuple[Any, ...]]:
    return undisturbed[0]


@pytest.fixture(scope="module")
def prompt_tokens(undisturbed: tuple[list[tuple[Any, ...]], float]) -> float:
    return undisturbed[1]


def check_what_is_read(told: list[dict[str, str]]) -> None:
    """That the undisturbed answers are the script's."""
    auto, forced, data, response, message = told
    for choice in range(2):
        assert auto[f"{choice} reasoning"] == "This needs a tool." and auto[f"{choice} content"] == "Let me."
        assert auto[f"{choice} arguments 0"] == auto[f"{choice} arguments 1"] == ARGUMENTS
    assert forced["0 name 0"] == "write" and json.loads(forced["0 arguments 0"]) == json.loads(ARGUMENTS)
    assert "0 content" not in forced
    assert json.loads(data["0 content"]) == json.loads(OBJECT)
    for parts, arguments in (
        (response, "response.function_call_arguments.delta"),
        (message, "input_json_delta"),
    ):
        assert [parts[f"{index} {arguments}"] for index in (2, 3)] == [ARGUMENTS] * 2


async def disturbed(server: Server, prompt_tokens: float, fault: Callable[[Server], None]) -> list[Any]:
    """Everybody's answers, with a fault in their midst."""
    tasks = await everybody(server, prompt_tokens)
    fault(server)
    return await asyncio.gather(*tasks, return_exceptions=True)


ALONE, RANKS = (), ("--tp", "2")
KILL, CRASH, STOP = signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "victim", "number"),
    [
        *((ALONE, "engine core", number) for number in (KILL, CRASH, STOP)),
        *(
            (RANKS, name, number)
            for name in ("engine core", "worker 0", "worker 1")
            for number in (KILL, STOP)
        ),
        (RANKS, "worker 1", CRASH),
    ],
    ids=str,
)
async def test_the_engine_or_a_rank_dies_or_hangs(
    ranks: tuple[str, ...],
    victim: str,
    number: int,
    tmp_path: Path,
    quiet: list[tuple[Any, ...]],
    prompt_tokens: float,
) -> None:
    with running_server(tmp_path, *flags(tmp_path), *ranks, "--hang-timeout", "2") as server:
        before = set(server.children())
        pid = server.child(victim)
        got = await disturbed(server, prompt_tokens, lambda server: os.kill(pid, number))
        assert [only(told) for told in got] == quiet
        await wait_until_ready(server)
        assert server.idle_metrics()["servelite_engine_restarts_total"] >= 1
        # Of the engine none is left, whoever of it died; the front end is the same.
        kept = before & set(server.children())
        assert kept == {server.child("front end 0")}
        assert len(server.children()) == len(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["exit", "error", "fail", "collective", "drop"], ids=lambda kind: f"{kind} of rank 1"
)
async def test_a_rank_fails(fault: str, tmp_path: Path, quiet: list[tuple[Any, ...]]) -> None:
    """In the first life, at a step in the midst of it all: the group ends, and the next one goes on."""
    step = ("--fault-injection", f"{fault}:step=120,rank=1")
    with running_server(tmp_path, *flags(tmp_path), *RANKS, *step, "--hang-timeout", "2") as server:
        assert [only(told) for told in await all_of(server)] == quiet
        await wait_until_ready(server)
        now = server.idle_metrics()
        assert now["servelite_engine_restarts_total"] >= 1
        assert now["servelite_requests_quarantined_total"] == 0
        assert ("it hung" if fault == "drop" else "worker 1: ") in server.errors()


@pytest.mark.slow
async def test_a_message_that_comes_late_is_no_fault(tmp_path: Path, quiet: list[tuple[Any, ...]]) -> None:
    delay = (*RANKS, "--fault-injection", "delay:step=20,rank=1", "--hang-timeout", "20")
    with running_server(tmp_path, *flags(tmp_path), *delay) as server:
        assert [only(told) for told in await all_of(server)] == quiet
        assert server.idle_metrics()["servelite_engine_restarts_total"] == 0


@pytest.mark.slow
async def test_a_step_fails(tmp_path: Path, quiet: list[tuple[Any, ...]]) -> None:
    with running_server(tmp_path, *flags(tmp_path), "--fault-injection", "fail:step=120") as server:
        assert [only(told) for told in await all_of(server)] == quiet
        assert "step 120 failed" in server.errors()
        assert server.idle_metrics()["servelite_engine_restarts_total"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [ALONE, RANKS], ids=str)
async def test_a_row_is_not_finite(
    ranks: tuple[str, ...], tmp_path: Path, quiet: list[tuple[Any, ...]]
) -> None:
    with running_server(
        tmp_path, *flags(tmp_path), *ranks, "--fault-injection", f"nan:token={MARK}"
    ) as server:
        status, refusal = server.post(*asked()[0])
        assert status == 500 and refusal["error"]["code"] == "non_finite_logits"
        assert [only(told) for told in await all_of(server, slice(1, None))] == quiet[1:]
        assert server.idle_metrics()["servelite_corrupted_requests_total"] == 1


@pytest.mark.slow
async def test_a_front_end_dies(tmp_path: Path, quiet: list[tuple[Any, ...]], prompt_tokens: float) -> None:
    with running_server(tmp_path, *flags(tmp_path), "--api-workers", "2") as server:
        victim = server.child("front end 1")
        got = await disturbed(server, prompt_tokens, lambda server: os.kill(victim, signal.SIGKILL))
        for mine, theirs in zip(got, quiet, strict=True):
            assert isinstance(mine, BaseException) or only(mine) == theirs
        deadline = time.monotonic() + 20
        while len(server.children()) < 3:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        server.idle_metrics()


@pytest.mark.slow
async def test_the_launcher_dies(tmp_path: Path, prompt_tokens: float) -> None:
    with running_server(tmp_path, *flags(tmp_path), *RANKS, "--runtime-dir", str(tmp_path / "r")) as server:
        children = server.children()
        assert len(children) == 4
        tasks = await everybody(server, prompt_tokens)
        server.signal(signal.SIGKILL)
        began = time.monotonic()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(end, BaseException) for end in ends)
        while any(Path(f"/proc/{child}").exists() and _runs(child) for child in children):
            assert time.monotonic() - began < 10  # 2 where nothing else runs
            await asyncio.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # empty for a zombie
    except OSError:
        return False
