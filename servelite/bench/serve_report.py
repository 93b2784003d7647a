"""What a level's requests amount to: figures, their JSON, their text."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from servelite.bench.load import LevelRun
from servelite.bench.percentiles import Distribution
from servelite.bench.stream_client import End, Outcome

_BUSY: Final = 0.5  # share of a core from which this client may be what is measured


@dataclass(frozen=True)
class LongPrompt:
    """A long prompt that arrived while the level's streams decoded; times in milliseconds."""

    prompt_tokens: int | None
    ttft_ms: float | None
    error: str
    gaps_before_ms: Distribution | None  # of the other streams, before it was sent
    gaps_during_ms: Distribution | None  # from there to its first token


@dataclass(frozen=True)
class LevelReport:
    """The figures of one level. Distributions are None where nothing was measured."""

    level: str
    streams: int  # 0 at a rate
    request_rate: float  # 0 with streams
    completed: int
    failed: int
    unfinished: int  # given up when the run was stopped
    errors: dict[str, int]  # how often each was seen
    short: int  # completed with fewer tokens than asked for
    seconds: float  # from the level's begin to the end of its last request
    prompt_tokens: int  # of completed requests, by the server's count
    cached_tokens: int  # of these, by the server's count
    output_tokens: int  # of completed requests, by the server's count; chunks of unfinished ones
    tokens_estimated: bool  # the server gave no counts for some: their chunks are counted
    requests_per_s: float  # completed
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt tokens of completed requests and output
    tokens_per_chunk: float  # of completed requests
    ttft_ms: Distribution | None
    itl_ms: Distribution | None  # from chunk to chunk
    tpot_ms: Distribution | None  # of each request, (last chunk - first chunk) / (tokens - 1)
    e2e_ms: Distribution | None  # of completed requests
    client_us_per_chunk: float  # this client's CPU
    client_cpu_share: float  # of a core
    long_prompt: LongPrompt | None

    @classmethod
    def of(cls, run: LevelRun) -> LevelReport:
        """The figures of `run`."""
        by_end = {end: [o for o in run.outcomes if o.end is end] for end in End}
        done, unfinished = by_end[End.COMPLETED], by_end[End.UNFINISHED]
        measured = done + unfinished
        seconds = max(run.ended - run.started, 1e-9)
        prompt = sum(o.prompt_tokens or 0 for o in done)
        output = sum(o.output_tokens for o in done)
        chunks = sum(len(o.chunks) for o in done)
        all_chunks = sum(len(o.chunks) for o in run.outcomes)
        produced = output + sum(len(o.chunks) for o in unfinished)
        return cls(
            level=str(run.level),
            streams=run.level.streams,
            request_rate=run.level.rate,
            completed=len(done),
            failed=len(by_end[End.FAILED]),
            unfinished=len(unfinished),
            errors=dict(collections.Counter(o.error for o in by_end[End.FAILED]).most_common()),
            short=sum(o.output_tokens < o.max_tokens for o in done),
            seconds=seconds,
            prompt_tokens=prompt,
            cached_tokens=sum(o.cached_tokens for o in done),
            output_tokens=produced,
            tokens_estimated=any(o.completion_tokens is None for o in done),
            requests_per_s=len(done) / seconds,
            output_tokens_per_s=produced / seconds,
            total_tokens_per_s=(produced + prompt) / seconds,
            tokens_per_chunk=output / chunks if chunks else 0.0,
            ttft_ms=Distribution.of((o.chunks[0] - o.started) * 1e3 for o in measured if o.chunks),
            itl_ms=Distribution.of(gap * 1e3 for o in measured for gap in o.gaps),
            tpot_ms=Distribution.of(_tpot_ms(done)),
            e2e_ms=Distribution.of((o.ended - o.started) * 1e3 for o in done),
            client_us_per_chunk=run.cpu_seconds / all_chunks * 1e6 if all_chunks else 0.0,
            client_cpu_share=run.cpu_seconds / seconds,
            long_prompt=_long_prompt(run.long_prompt, measured),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @property
    def any_failed(self) -> bool:
        """Whether any request did, the long prompt's included."""
        return self.failed > 0 or (self.long_prompt is not None and self.long_prompt.error != "")


def _tpot_ms(done: Sequence[Outcome]) -> Iterator[float]:
    for o in done:
        if len(o.chunks) > 1 and o.output_tokens > 1:
            yield (o.chunks[-1] - o.chunks[0]) / (o.output_tokens - 1) * 1e3


def _long_prompt(long: Outcome | None, others: Sequence[Outcome]) -> LongPrompt | None:
    if long is None:
        return None
    first = long.chunks[0] if long.chunks else None
    until = long.ended if first is None else first
    spans = [span for o in others for span in zip(o.chunks, o.chunks[1:], strict=False)]
    return LongPrompt(
        prompt_tokens=long.prompt_tokens,
        ttft_ms=None if first is None else (first - long.started) * 1e3,
        error=long.error if long.end is End.FAILED else "",
        gaps_before_ms=Distribution.of((b - a) * 1e3 for a, b in spans if b < long.started),
        gaps_during_ms=Distribution.of((b - a) * 1e3 for a, b in spans if b >= long.started and a <= until),
    )


def level_text(report: LevelReport) -> str:
    """A level's figures as a few lines."""
    r = report
    counts = [f"{r.completed} completed", f"{r.failed} failed"]
    counts += [f"{r.unfinished} unfinished"] if r.unfinished else []
    lines = [
        f"{r.level}: {', '.join(counts)} in {r.seconds:.2f} s",
        f"  throughput: {r.output_tokens_per_s:.1f} output tokens/s, {r.total_tokens_per_s:.1f} with the "
        f"prompts', {r.requests_per_s:.2f} requests/s",
        f"  {'':<26}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}{'mean':>10}",
        _row("time to first token", r.ttft_ms),
        _row("inter-token latency", r.itl_ms),
        _row("time per output token", r.tpot_ms),
        _row("end to end", r.e2e_ms),
    ]
    lines += _token_lines(r)
    lines += [f"  failed {times} x: {error}" for error, times in r.errors.items()]
    if r.long_prompt is not None:
        lines += _long_prompt_lines(r.long_prompt)
    lines.append(
        f"  this client: {r.client_us_per_chunk:.0f} us of CPU a chunk, {r.client_cpu_share:.0%} of a core"
    )
    if r.client_cpu_share > _BUSY:
        lines.append("  warning: this client may itself be what limits these figures")
    return "\n".join(lines)


def _row(name: str, values: Distribution | None) -> str:
    label = f"  {name + ' (ms)':<26}"
    if values is None:
        return f"{label}{'-':>10}"
    shown = (values.p50, values.p90, values.p99, values.max, values.mean)
    return label + "".join(f"{value:>10.2f}" for value in shown)


def _token_lines(r: LevelReport) -> list[str]:
    lines = []
    if r.completed:
        cached = f" ({r.cached_tokens} from the server's cache)" if r.cached_tokens else ""
        counted = ", counted by chunks" if r.tokens_estimated else ""
        a_prompt = r.prompt_tokens / r.completed
        lines.append(
            f"  tokens: {a_prompt:.1f} a prompt{cached}, {r.output_tokens} out{counted}, "
            f"{r.tokens_per_chunk:.2f} a chunk"
        )
    if r.short:
        lines.append(f"  note: {r.short} answers were shorter than asked for")
    return lines


def _long_prompt_lines(long: LongPrompt) -> list[str]:
    if long.error:
        return [f"  the long prompt failed: {long.error}"]
    if long.ttft_ms is None:
        return ["  the long prompt: no first token came"]
    before, during = long.gaps_before_ms, long.gaps_during_ms
    gaps = [
        f"gaps {when} it p50 {gap.p50:.1f} ms, max {gap.max:.1f} ms"
        for when, gap in (("before", before), ("during", during))
        if gap is not None
    ]
    return [
        f"  a prompt of {long.prompt_tokens} tokens meanwhile: first token after {long.ttft_ms:.1f} ms",
        *(f"    the other streams' {gap}" for gap in gaps),
    ]


def summary_text(reports: Sequence[LevelReport]) -> str:
    """One line a level, to compare them."""
    width = max(12, *(len(r.level) for r in reports))
    heads = (
        "done", "failed", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "out tok/s", "all tok/s", "req/s",
    )  # fmt: skip
    lines = [f"{'':<{width}}" + "".join(f"{head:>10}" for head in heads)]
    for r in reports:
        cells: list[float | int | None] = [r.completed, r.failed]
        for times in (r.ttft_ms, r.itl_ms):
            cells += [times.p50, times.p99] if times else [None, None]
        cells += [r.output_tokens_per_s, r.total_tokens_per_s, r.requests_per_s]
        lines.append(f"{r.level:<{width}}" + "".join(_cell(cell) for cell in cells))
    return "\n".join([*lines, "times in ms"])


def _cell(value: float | int | None) -> str:
    if value is None:
        return f"{'-':>10}"
    return f"{value:>10}" if isinstance(value, int) else f"{value:>10.2f}"
