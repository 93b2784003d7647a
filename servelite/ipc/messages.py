"""Every message that crosses a process border, as msgspec structs in msgpack.

Integer columns travel as little-endian bytes and are read in place with `numpy.frombuffer`: a step
of 64 requests is one message of a few hundred bytes, not 64 objects. A field is only ever added at
the end and with a default (the structs are array-like: position is identity).

Nobody may use pickle or reflection on a socket.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

TOKEN: Final = np.dtype("<i4")  # token IDs, positions, rows, block IDs
NUMBER: Final = np.dtype("<i8")  # request numbers
FLAG: Final = np.dtype("<i1")  # finish reasons, small flags


def pack(values: npt.ArrayLike, dtype: np.dtype = TOKEN) -> bytes:
    """`values` (any integer array-like, 1-D) as the bytes of one column."""
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def unpack(column: bytes, dtype: np.dtype = TOKEN) -> npt.NDArray:
    """The read-only array behind one column, without a copy."""
    return np.frombuffer(column, dtype)  # by position: by keyword it takes twice as long


# ---------------------------------------------------------------- front end -> engine


class Kind(enum.IntEnum):
    """What a request wants of the model."""

    GENERATE = 0
    POOL = 1


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How one request's tokens are drawn and when it stops. The front end has validated it all.

    Order of application: bias, penalties, masks (grammar, min_tokens, allowed_token_ids),
    temperature, top-k, top-p, min-p. A temperature of 0 is greedy.
    """

    max_tokens: int  # at least 1; prompt + max_tokens never exceeds the model's length
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # EOS included, unless the client said ignore_eos
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int = -1  # -1: none; k: the chosen token's and the k best
    prompt_logprobs: int = -1


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A front end's first message; the engine answers with `Ready`."""

    client: int  # the front end's index under its launcher
    contract: int  # CONTRACT_VERSION of the sender


class Add(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request. A resume after an engine's death is an Add with `produced` and a higher `attempt`.

    The boundary for penalties, min_tokens, usage and output positions stays the prompt's length,
    whatever `produced` holds. `seed` is never absent: the front end draws one where the client
    gave none, so that a resumed answer continues as it would have.
    """

    request: int  # unique for the sending front end's life
    prompt: bytes  # token IDs (TOKEN)
    sampling: SamplingParams  # of Kind.POOL: max_tokens is 1, and says nothing
    seed: int  # 64 bits, unsigned
    choice: int = 0  # which of `n`
    attempt: int = 0
    produced: bytes = b""  # token IDs already delivered (TOKEN)
    kind: Kind = Kind.GENERATE
    block_hashes: bytes = b""  # `tokenizer.block_hashes` of the prompt's full blocks
    cache_salt: str = ""
    adapter: str = ""
    grammar: str = ""
    tenant: str = ""
    priority: int = 0  # lower runs first
    deadline_ms: int = -1  # what was left of it when this was sent; -1: none
    prefix_of: int = -1  # the request whose prompt this one waits for (choices 2 to n)
    media: tuple[bytes, ...] = ()


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ends requests of the sender. Idempotent, valid in every state, unknown numbers are ignored."""

    requests: bytes  # NUMBER


ToEngine = Hello | Add | Abort

# ---------------------------------------------------------------- engine -> front end


class FinishReason(enum.IntEnum):
    """Why a request ended; NONE while it goes on."""

    NONE = 0
    STOP = 1  # a stop token (it is the last token delivered)
    LENGTH = 2
    ABORT = 3
    ERROR = 4  # see `Outputs.errors`


class RequestError(msgspec.Struct, frozen=True, array_like=True):
    """Why the engine refused a request or gave it up."""

    status: int  # the HTTP status that fits
    code: str  # stable and machine-readable: "context_length_exceeded", "queue_full", ...
    message: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of consecutive tokens of one request, `k` alternatives each."""

    first_index: int
    k: int
    chosen: bytes  # float32
    ids: bytes  # TOKEN, k a token
    values: bytes  # float32, k a token


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Where a finished request's time went, in seconds by the engine's clock."""

    queued: float
    prefill: float
    decode: float
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


class Load(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state and totals since its start, for metrics and admission."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    aborted: int = 0
    corrupted: int = 0  # rows ended by the non-finite flag
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """What one step gave one front end's requests; one message a step.

    `first_index` counts from the request's first output token (produced ones included), which makes
    delivery exactly-once; a count above 1 is speculation; `epoch` lets a dead engine's late
    messages be dropped. Sent with empty columns where only the load changed.
    """

    engine: int
    epoch: int
    step: int
    load: Load
    requests: bytes = b""  # NUMBER
    first_index: bytes = b""  # TOKEN
    counts: bytes = b""  # TOKEN
    finish: bytes = b""  # FLAG, FinishReason
    tokens: bytes = b""  # TOKEN, flat
    errors: dict[int, RequestError] = {}
    timings: dict[int, Timings] = {}
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, TokenLogprobs] = {}
    vectors: dict[int, bytes] = {}  # float32


class KVGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers whose blocks live and die together."""

    kind: str  # "full", "window", "state", "none"
    layers: tuple[int, ...]
    block_bytes: int  # of one block of this group, all its layers
    window: int = 0  # tokens; 0 unless kind is "window"


class Pooling(msgspec.Struct, frozen=True, array_like=True):
    """How a prompt becomes one vector."""

    kind: str  # "mean", "last" or "cls" (the first): of which positions' hidden states
    normalize: bool  # to a length of 1; the front end does it, after it has cut the vector
    size: int  # numbers in a vector


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Facts the engine found at its start: told once, never computed again by a front end."""

    engine: int
    epoch: int
    contract: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    dtype: str
    device: str
    executor: str
    kv_groups: tuple[KVGroup, ...] = ()
    features: tuple[str, ...] = ()  # optional abilities: "logprobs", "grammar", "lora", ...
    ledger: tuple[tuple[str, float], ...] = ()  # start-up phases and their seconds
    pooling: Pooling | None = None  # None: requests of Kind.POOL are refused
    encoder: bool = False  # and those of Kind.GENERATE are, by an encoder


FromEngine = Outputs | Ready

# ---------------------------------------------------------------- engine <-> ranks


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """Everything a worker must know of a request that takes a row (admitted or re-admitted)."""

    row: int
    generation: int
    tokens: bytes  # TOKEN: the prompt, then all tokens produced so far
    prompt_len: int
    num_computed: int  # prefix hits: where computing starts
    seed: int
    choice: int
    sampling: SamplingParams
    adapter: str = ""
    pools: bool = False  # it ends with its prompt, and a vector


class Plan(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """One step: what every rank runs, in lockstep. Only changes are sent.

    A row starts where its last step ended; its input tokens lie in the worker's resident table, a
    token sampled a step ago among them. Flat order of the batch is the order of `rows`.
    `block_counts` is [groups, rows]; `block_ids` holds the new blocks in that order, to be appended
    to each row's table.
    """

    epoch: int
    step: int  # consecutive; a worker that sees a gap stops
    rows: bytes  # TOKEN
    generations: bytes  # TOKEN
    num_tokens: bytes  # TOKEN: how many of the row's tokens this step computes
    num_drafts: bytes  # TOKEN, how many of these are drafts; empty: none at all
    num_logits: bytes  # TOKEN: how many of the last positions need logits (0: a chunk, 1: sample)
    block_counts: bytes  # TOKEN
    block_ids: bytes  # TOKEN
    new_rows: tuple[NewRow, ...] = ()
    copies: bytes = b""  # TOKEN pairs (source block, destination block), done before the step
    needs_masks: bool = False  # `sample` gets bit masks


class RowFlag(enum.IntFlag):
    """What a worker reports of a sampled row."""

    OK = 0
    NON_FINITE = 1


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """What a step sampled: one entry a row of the plan with `num_logits` > 0, in plan order.

    A row samples if all tokens that the worker has of it are computed; one that does not (it had
    logits for its prompt's logprobs only, or it pools) has a count of 0.
    """

    epoch: int
    step: int
    rows: bytes  # TOKEN
    generations: bytes  # TOKEN
    counts: bytes  # TOKEN: tokens a row
    tokens: bytes  # TOKEN, flat
    flags: bytes  # FLAG, RowFlag
    logprobs: dict[int, TokenLogprobs] = {}  # by row
    seconds: tuple[float, ...] = ()  # prepare, forward, sample
    checksum: int = 0  # of `tokens`, for ranks to confirm
    prompt_logprobs: dict[int, TokenLogprobs] = {}  # by row; `first_index` is a prompt position
    vectors: dict[int, bytes] = {}  # float32, by row: those that pool, and whose prompt is computed


@dataclass(frozen=True)
class RunnerFacts:
    """What a model runner found when it was made; it sizes the scheduler and goes into `Ready`."""

    num_blocks: int  # in the KV pool
    block_size: int  # tokens
    max_model_len: int  # tokens
    vocab_size: int
    kv_groups: tuple[KVGroup, ...]
    dtype: str  # "float32", "bfloat16", "none" (simulated)
    device: str  # "cpu", "none" (simulated)
    ledger: tuple[tuple[str, float], ...] = ()  # start-up phases and their seconds
    features: tuple[str, ...] = ()  # optional abilities: "logprobs"
    pooling: Pooling | None = None
    encoder: bool = False  # every token sees all of its prompt, which takes one step; there is no KV cache


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """A rank's first message: it waits for plans. All ranks of a group say the same but for the ledger."""

    facts: RunnerFacts


class RankDone(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """What the other ranks answer where rank 0 sends a `StepResult`: they have sampled, and what."""

    epoch: int
    step: int
    checksum: int  # as `StepResult.checksum`; another one means that the ranks have diverged


FromRank = RankReady | StepResult | RankDone

# ---------------------------------------------------------------- launcher <-> children


class RingFds(msgspec.Struct, frozen=True, array_like=True):
    """The descriptors of one `ipc.ring`: one writer, several readers."""

    memory: int  # memfd
    readers: tuple[int, ...]  # an eventfd each: how many frames it has not read
    space: int  # eventfd: a reader has made room that the writer waits for


class RankGroup(msgspec.Struct, frozen=True, array_like=True):
    """What an engine and its ranks share in one life, by descriptors that all of them inherit."""

    plans: RingFds  # from the engine to every rank
    results: tuple[RingFds, ...]  # from each rank to the engine
    collective: int  # memfd, for the ranks' collectives

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.results)

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors."""
        rings = (self.plans, *self.results)
        return (*(fd for ring in rings for fd in (ring.memory, *ring.readers, ring.space)), self.collective)


class Boot(msgspec.Struct, frozen=True, tag="boot"):
    """The launcher's first message to a child, over its lifeline."""

    settings: dict[str, object]  # config.Settings
    index: int  # of the front end, engine or rank
    epoch: int
    engine_address: str  # carries the engine's index and epoch
    progress_fd: int
    listen_fd: int = -1  # front ends only
    folder: str = ""  # of the server's sockets; front ends and ranks
    group: RankGroup | None = None  # engine and ranks; None: the engine runs the model itself


class ChildReady(msgspec.Struct, frozen=True, tag="ready"):
    """A child serves. The engine says so when a token could be produced."""

    ledger: tuple[tuple[str, float], ...] = ()


class ChildFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A child's own account of its death; the launcher prints it last."""

    kind: str  # exception type
    message: str
    hint: str = ""
    exit_code: int = 1
    traceback: str = ""


class EngineUp(msgspec.Struct, frozen=True, tag="engine_up"):
    """Control: connect to this engine."""

    address: str
    epoch: int


class EngineDown(msgspec.Struct, frozen=True, tag="engine_down"):
    """Control: the engine is dead."""

    epoch: int
    cause: str
    final: bool = False  # no other one will come


class FrontEndGone(msgspec.Struct, frozen=True, tag="front_end_gone"):
    """Control, to the engine: a front end is dead; its requests are to be aborted."""

    client: int
    pid: int  # of the dead one: its successor may have said hello before this is read


class EngineStalled(msgspec.Struct, frozen=True, tag="engine_stalled"):
    """Control: the engine has work and does not move, or moves again."""

    stalled: bool


class Resubmit(msgspec.Struct, frozen=True, tag="resubmit"):
    """Control: the front end's unfinished requests may be resubmitted now: these, or all."""

    requests: tuple[int, ...] | None = None  # None: all, and new ones are taken again


class Quarantine(msgspec.Struct, frozen=True, tag="quarantine"):
    """Control: this request killed an engine when it ran alone; it gets a 500 and is not resubmitted."""

    request: int
    cause: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Control: refuse new requests after `delay` s, end what is left after `timeout` s more."""

    delay: float
    timeout: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Control: end now."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """A front end's answer to Drain: nothing is in flight any more."""

    unfinished: int = 0  # answers that were ended with an error, or whose client did not read them


class Passed(msgspec.Struct, frozen=True, tag="passed"):
    """A front end's word on requests that a `Resubmit` named: they have had a token, or have ended."""

    requests: tuple[int, ...]


ToChild = Boot | EngineUp | EngineDown | EngineStalled | FrontEndGone | Resubmit | Quarantine | Drain | Stop
FromChild = ChildReady | ChildFailed | Drained | Passed

CONTRACT_VERSION: Final = 1
