"""Decides, once a step, which tokens of which requests run; and takes in what the step gave.

There is no prefill or decode phase: a request has `num_computed` tokens, wants to reach
`num_tokens`, and gets what the step's token budget allows. A token whose step is in flight is a
placeholder: counted in `num_tokens`, its value not known here, but on the device when the next step
reads it. The synchronous engine is depth 1 of the same code.

Blocks and rows of a request that ends or is preempted stay held until its last submitted step has
completed; only then may another request get them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from servelite.engine.grammars import ENDS, OVER
from servelite.engine.invariants import InvariantError
from servelite.engine.kv_cache import KVCacheManager
from servelite.engine.lifecycle import RequestLifecycle
from servelite.engine.outbox import Outbox
from servelite.engine.request import STOP_COLUMNS, Request
from servelite.ipc.messages import (
    FLAG,
    FinishReason,
    Kind,
    Load,
    NewRow,
    Plan,
    RequestError,
    RowFlag,
    StepResult,
    Timings,
    pack,
    unpack,
)
from servelite.ipc.states import State
from servelite.tokenizer.block_hashes import next_hash, root_hash

_Ints = npt.NDArray[np.int32]

_WATERMARK: Final = 0.01
"""Part of the pool that admission leaves free for the requests that run already."""

_MOST_FAILED_STEPS: Final = 3
"""Failed steps in a row after which a request is taken for the cause."""

STEP_FAILED: Final = RequestError(500, "step_failed", "the engine could not compute this request")
CORRUPTED: Final = RequestError(
    500, "non_finite_logits", "the model's output for this request was not finite"
)


@dataclass
class _Draft:
    """A plan in the making. Decodes are a column; only prefills are looked at one by one."""

    budget: int
    decodes: _Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    prefills: dict[int, int] = field(default_factory=dict)  # tokens by row
    preempted: bool = False

    def give(self, row: int, count: int) -> None:
        self.prefills[row] = count
        self.budget -= count


class Scheduler:
    """Plans steps and takes their results in, for the requests of one `RequestLifecycle`."""

    def __init__(
        self,
        requests: RequestLifecycle,
        kv: KVCacheManager,
        outbox: Outbox,
        *,
        max_num_batched_tokens: int,
        epoch: int,
        chunked: bool = True,
    ) -> None:
        """`chunked`: a prompt may take several steps; if not, none is above the budget."""
        self.requests, self.kv, self._outbox = requests, kv, outbox
        self._rows, self._waiting = requests.rows, requests.waiting
        self._budget, self._epoch, self._chunked = max_num_batched_tokens, epoch, chunked
        self._step = 0
        self.void_to = 0  # steps up to this one count for nothing, whatever they give

    # ------------------------------------------------------------ a step's plan

    def schedule(self) -> Plan | None:
        """The next step, or None where nothing can run now."""
        if self.requests.grammars.pending:
            self.requests.unpark_compiled()
        self.requests.expire()
        draft = _Draft(self._budget)
        if self.requests.order:
            self._schedule_running(draft)
        if len(self._waiting) and not draft.preempted:
            self._admit(draft)
        draft.decodes = draft.decodes[self._rows.running[draft.decodes]]  # less those a prefill preempted
        return self._compose(draft) if draft.prefills or len(draft.decodes) else None

    def _schedule_running(self, draft: _Draft) -> None:
        """Decodes first, so that they never wait for a prefill; then prefills share what is left."""
        columns, rows = self._rows, np.asarray(self.requests.order, dtype=np.int32)
        want = np.minimum(columns.num_tokens[rows], columns.limit[rows]) - columns.num_computed[rows]
        decodes, prefills = rows[want == 1], rows[want > 1]
        end = columns.num_computed[decodes] + 1
        # Only rows that cross a block border are looked at one by one.
        border = end > self.kv.counts[:, decodes].min(axis=0) * self.kv.block_size
        for row in decodes[border].tolist():
            if columns.running[row]:
                self._make_room(row, int(columns.num_computed[row]) + 1, draft)
        held = self.kv.counts[:, decodes].min(axis=0) * self.kv.block_size
        draft.decodes = decodes[columns.running[decodes] & (end <= held)]
        draft.budget -= len(draft.decodes)
        for position, row in enumerate(prefills.tolist()):
            if columns.running[row] and draft.budget > 0:
                self._schedule_prefill(row, others=len(prefills) - position - 1, draft=draft)

    def _schedule_prefill(self, row: int, others: int, draft: _Draft) -> None:
        columns = self._rows
        computed = int(columns.num_computed[row])
        want = min(int(columns.num_tokens[row]), int(columns.limit[row])) - computed
        count = min(want, self._share(draft, others))
        if row == self.requests.order[0] and not self.kv.grow(row, computed + count):
            # The first-ranked request always moves on, at others' cost: no deadlock.
            self._make_room(row, computed + 1, draft)
        room = int(self.kv.counts[:, row].min()) * self.kv.block_size - computed
        room += self.kv.num_free // len(self.kv.groups) * self.kv.block_size
        count = min(count, room)
        if count > 0 and self.kv.grow(row, computed + count):
            draft.give(row, count)

    def _share(self, draft: _Draft, others: int) -> int:
        """Tokens the next prefill may take: half of what is left while others wait, so that a short
        prompt behind a long one starts soon."""
        others_wait = others > 0 or (len(self._waiting) > 0 and len(self._rows.free) > 0)
        return max(1, draft.budget // 2) if others_wait else draft.budget

    def _make_room(self, row: int, num_tokens: int, draft: _Draft) -> bool:
        """Blocks for the row to hold `num_tokens`, by preemption if need be.

        False where it has to wait for blocks that steps in flight still hold, or was itself the victim.
        """
        while not self.kv.grow(row, num_tokens):
            if self.kv.num_free + self.requests.freeing >= self.kv.missing(row, num_tokens):
                return False  # enough is on its way
            victim = self._victim()
            if victim is None:
                return False
            draft.prefills.pop(victim, None)
            draft.preempted = True
            self.requests.preempt(victim)
            if victim == row:
                return False
        return True

    def _victim(self) -> int | None:
        """Of the class that ranks last, the row that costs least to recompute; never the first-ranked."""
        candidates = self.requests.order[1:]
        if not candidates:
            return None
        requests = self._rows.requests
        ranks = {row: request.rank for row in candidates if (request := requests[row]) is not None}
        lowest = max(rank[0] for rank in ranks.values())
        in_class = [row for row in candidates if ranks[row][0] == lowest]
        return min(in_class, key=lambda row: (self._cost(row), -ranks[row][1]))

    def _cost(self, row: int) -> int:
        """Tokens to compute again if the row is preempted."""
        return max(0, int(self._rows.num_computed[row]) - self.kv.shared_tokens(row))

    def _admit(self, draft: _Draft) -> None:
        """Seat waiting requests by rank while budget, rows and blocks last; the first misfit ends it."""
        while draft.budget > 0 and self._rows.free and (request := self._waiting.peek()) is not None:
            reserve = int(self.kv.pool.num_blocks * _WATERMARK) if self.requests.order else 0
            if self.kv.num_free <= reserve:
                return
            # The last token is always computed: its logits are what the answer begins with.
            limit = (len(request.tokens) - 1) // self.kv.block_size
            if request.wants_prompt_logprobs or not request.reads_cache:
                limit = 0  # what is not computed has no logits
            hit = self.kv.find_hit(request.names, limit, self._step + 1)
            cached = hit.num_blocks * self.kv.block_size
            want = min(len(request.tokens), request.max_total - 1) - cached
            others = len(self._waiting) > 1 and len(self._rows.free) > 1
            count = min(want, max(1, draft.budget // 2) if others and self._chunked else draft.budget)
            if count < want and not self._chunked:
                return  # it has the next step's whole budget
            blocks = -(-(cached + count) // self.kv.block_size) - hit.num_blocks
            need = blocks * len(self.kv.groups) + hit.num_free(self.kv.pool)
            if need + reserve > self.kv.num_free:
                return
            self.requests.leave_queue(request)
            self.requests.seat(request, cached)
            self.kv.adopt(request.row, hit)
            self.kv.grow(request.row, cached + count)
            draft.give(request.row, count)

    def _compose(self, draft: _Draft) -> Plan:
        """Turn the draft into a plan and count its tokens as submitted."""
        self._step += 1
        columns = self._rows
        prefills = np.asarray(list(draft.prefills.items()), dtype=np.int32).reshape(-1, 2)
        rows = np.concatenate([draft.decodes, prefills[:, 0]])
        counts = np.concatenate([np.ones_like(draft.decodes), prefills[:, 1]])
        new_rows = tuple(self._introduce(request) for request in self.requests.new_rows)
        self.requests.new_rows.clear()
        columns.num_computed[rows] += counts
        samples = columns.num_computed[rows] == columns.num_tokens[rows]
        columns.num_tokens[rows] += samples  # a placeholder each
        columns.in_flight[rows] += 1
        self._publish_full_blocks(rows)
        block_counts, block_ids = self.kv.untold(rows)
        self.requests.totals.steps += 1
        self.requests.totals.scheduled_tokens += int(counts.sum())
        return Plan(
            epoch=self._epoch,
            step=self._step,
            rows=pack(rows),
            generations=pack(columns.generation[rows]),
            num_tokens=pack(counts),
            num_drafts=b"",
            num_logits=pack(self._num_logits(rows, counts, samples)),
            block_counts=pack(block_counts.ravel()),
            block_ids=pack(block_ids),
            new_rows=new_rows,
            needs_masks=bool((columns.constrained[rows] & samples).any()),
        )

    def masks(self, plan: Plan) -> bytes:
        """The masks that a plan needs; every step before it has completed."""
        frame, dead = self.requests.grammars.masks(self._rows, plan)
        for request, error in dead:
            self.requests.fail(request, error)
        return frame

    def _num_logits(self, rows: _Ints, counts: _Ints, samples: npt.NDArray[np.bool_]) -> _Ints:
        """1 for a row that samples; all of a prompt's chunk where its logprobs are wanted."""
        in_prompt = self._rows.num_computed[rows] - counts < self._rows.prompt_len[rows]
        whole = self._rows.prompt_logprobs[rows] & in_prompt
        return np.where(whole, counts, samples).astype(np.int32)

    def _publish_full_blocks(self, rows: _Ints) -> None:
        """Offer blocks that are full, with all tokens known and submitted, to the prefix cache."""
        columns, size = self._rows, self.kv.block_size
        full = np.minimum(columns.num_computed[rows], columns.num_known[rows]) // size
        for at in np.flatnonzero(full > self.kv.published[rows]):
            row, count = int(rows[at]), int(full[at])
            request = self.requests.at(row)
            names, add = request.names, request.add
            while len(names) < count:
                parent = names[-1] if names else root_hash(add.cache_salt, add.adapter)
                begin = len(names) * size
                names.append(next_hash(parent, pack(columns.tokens[row, begin : begin + size])))
            self.kv.publish(row, names[:count], self._step)

    def _introduce(self, request: Request) -> NewRow:
        return NewRow(
            row=request.row,
            generation=int(self._rows.generation[request.row]),
            tokens=pack(request.tokens),
            prompt_len=request.prompt_len,
            num_computed=request.hit_blocks * self.kv.block_size,
            seed=request.add.seed,
            choice=request.add.choice,
            sampling=request.add.sampling,
            adapter=request.add.adapter,
            pools=request.add.kind is Kind.POOL,
        )

    # ------------------------------------------------------------ a step's result

    def update(self, plan: Plan, result: StepResult) -> None:
        """Take in the result of the oldest step in flight."""
        if plan.step <= self.void_to:
            return
        columns = self._rows
        planned = unpack(plan.rows)
        sampled = unpack(result.counts) > 0
        reported, tokens = unpack(result.rows), unpack(result.tokens)
        rows = reported[sampled]
        if (columns.generation[planned] != unpack(plan.generations)).any() or (
            columns.generation[rows] != unpack(result.generations)[sampled]
        ).any():
            raise InvariantError(f"step {plan.step} touches a row that was given away")
        columns.in_flight[planned] -= 1
        columns.num_done[planned] += unpack(plan.num_tokens)
        for row in reported[(unpack(result.flags, FLAG) & RowFlag.NON_FINITE).astype(bool)].tolist():
            self._corrupt(row)
        self._note_logprobs(result)
        self._take_vectors(result)
        self._append(rows, tokens)
        running = planned[columns.running[planned]]
        self.kv.drop_out_of_window(running, columns.num_done[running])
        for row in planned[(columns.in_flight[planned] == 0) & ~columns.running[planned]].tolist():
            request = columns.requests[row]
            if request is not None:
                self.requests.release(request)

    def _note_logprobs(self, result: StepResult) -> None:
        for by_row, add in (
            (result.logprobs, self._outbox.add_logprobs),
            (result.prompt_logprobs, self._outbox.add_prompt_logprobs),
        ):
            for row, logprobs in by_row.items():
                request = self._rows.requests[row]
                if request is not None and request.state is not State.FINISHING and not request.distrusted:
                    add(request.client, request.add.request, logprobs)

    def _take_vectors(self, result: StepResult) -> None:
        """The prompts of rows that pool are computed: these end."""
        for row, vector in result.vectors.items():
            request = self._rows.requests[row]
            if request is not None and request.state is not State.FINISHING and not request.distrusted:
                request.first_token = self.requests.clock()
                self._outbox.add_vector(request.client, request.add.request, vector)
                self._outbox.add_timings(request.client, request.add.request, self._timings(request))
                self.requests.end(request)

    def _append(self, rows: _Ints, tokens: _Ints) -> None:
        """Sampled tokens become known; rows that end with them end."""
        columns = self._rows
        live = np.ones(len(rows), dtype=bool)
        for at in np.flatnonzero(~columns.running[rows]):
            request = columns.requests[rows[at]]
            live[at] = request is not None and request.state is State.PREEMPTED and not request.distrusted
        rows, tokens = rows[live], tokens[live]
        verdicts = self.requests.grammars.advance(columns, rows, tokens)
        taken = verdicts >= 0
        for row, verdict in zip(rows[~taken].tolist(), verdicts[~taken].tolist(), strict=True):
            self.requests.fail(self.requests.at(row), ENDS[verdict])
        if not taken.all():
            rows, tokens, verdicts = rows[taken], tokens[taken], verdicts[taken]
        known = columns.num_known[rows]
        columns.tokens[rows, known] = tokens
        columns.num_known[rows] = known + 1
        self._publish_full_blocks(rows)
        self._forgive(rows)
        index = known - columns.prompt_len[rows]
        finish = self._finish_reasons(rows, tokens)
        finish[verdicts == OVER] = FinishReason.STOP
        self._outbox.add_tokens(columns.client[rows], columns.number[rows], index, finish, tokens)
        for row in rows[index == 0].tolist():
            self._mark_first_token(self.requests.at(row))
        for row in rows[finish != FinishReason.NONE].tolist():
            request = self.requests.at(row)
            self._outbox.add_timings(request.client, request.add.request, self._timings(request))
            self.requests.end(request)

    def _forgive(self, rows: _Ints) -> None:
        """Rows that got a token did not fail this time."""
        for row in rows[self._rows.suspect[rows]].tolist():
            self.requests.at(row).failed_steps = 0
            self._rows.suspect[row] = False

    def _corrupt(self, row: int) -> None:
        """A row was not finite: it ends, nobody finds what it computed, and who shares that computes
        anew, tokens still in flight included."""
        request = self._rows.requests[row]
        if request is None or request.state is State.FINISHING or request.distrusted:
            return  # it is over, or computes anew already
        self.requests.totals.corrupted += 1
        suspects, seen = [row], set[int]()
        while suspects:
            suspect = suspects.pop()
            seen.add(suspect)
            suspects += self.kv.retract(suspect, self.requests.at(suspect).hit_blocks) - seen
        for sharer in seen - {row}:
            if self._rows.running[sharer]:
                self.requests.at(sharer).distrusted = True
                self.requests.preempt(sharer)
        self.requests.fail(request, CORRUPTED)

    def _finish_reasons(self, rows: _Ints, tokens: _Ints) -> npt.NDArray[np.int8]:
        columns = self._rows
        stopped = (columns.stop_ids[rows] == tokens[:, None]).any(axis=1)
        for at in np.flatnonzero(columns.many_stops[rows]):
            stops = self.requests.at(int(rows[at])).add.sampling.stop_token_ids
            stopped[at] |= int(tokens[at]) in stops[STOP_COLUMNS:]
        full = columns.num_known[rows] > columns.limit[rows]
        finish = np.where(full, FinishReason.LENGTH, FinishReason.NONE)
        return np.where(stopped, FinishReason.STOP, finish).astype(np.int8)

    def _mark_first_token(self, request: Request) -> None:
        request.first_token = self.requests.clock()
        if request.cached_tokens:  # told now: an answer that a stop string ends is told no more
            self._outbox.add_timings(request.client, request.add.request, self._timings(request))
        self.requests.unpark_followers(request)

    def _timings(self, request: Request) -> Timings:
        now = self.requests.clock()
        admitted = request.arrived if request.admitted is None else request.admitted
        first = now if request.first_token is None else request.first_token
        return Timings(
            queued=admitted - request.arrived,
            prefill=max(0.0, first - admitted),
            decode=max(0.0, now - max(first, admitted)),
            cached_tokens=request.cached_tokens,
            preemptions=request.preemptions,
            recomputed_tokens=request.recomputed_tokens,
        )

    def void_steps(self, first: int) -> None:
        """Step `first` and all after it gave nothing; none is in flight any more, but for one that waits for
        its masks: what it gives counts no more.

        Every request that runs starts again from what the prefix cache still holds. One whose steps
        keep failing is given up: it may be the cause.
        """
        self.kv.pool.unpublish_from(first)
        self._rows.in_flight[:] = 0
        for request in [request for request in self._rows.requests if request is not None]:
            if request.state is not State.RUNNING:
                self.requests.release(request)
                continue
            request.failed_steps += 1
            if request.failed_steps == _MOST_FAILED_STEPS:
                self.requests.fail(request, STEP_FAILED)
            else:
                self.requests.preempt(request.row)
        self.void_to = self._step

    # ------------------------------------------------------------ state for others

    def load(self) -> Load:
        """The present state and the totals."""
        return Load(
            running=len(self.requests.order),
            waiting=len(self._waiting) + self.requests.num_parked(),
            waiting_tokens=self._waiting.num_tokens,
            free_blocks=self.kv.num_free,
            **vars(self.requests.totals),
        )

    def in_step(self, plan: Plan) -> tuple[_Ints, npt.NDArray[np.int64]]:
        """(clients, request numbers) of the plan's rows, for the progress page."""
        rows = unpack(plan.rows)
        return self._rows.client[rows], self._rows.number[rows]
