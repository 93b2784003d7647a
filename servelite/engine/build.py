"""Puts an engine core together from settings and a runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from servelite import config
from servelite.engine.admission import Admission
from servelite.engine.core import EngineCore
from servelite.engine.grammars import RequestGrammars
from servelite.engine.kv_cache import KVCacheManager
from servelite.engine.lifecycle import RequestLifecycle, WaitingLimits
from servelite.engine.mailbox import Mailbox
from servelite.engine.outbox import Outbox
from servelite.engine.policies import make_policy
from servelite.engine.request import RowTable
from servelite.engine.scheduler import Scheduler
from servelite.executor.base import Executor
from servelite.ipc.messages import CONTRACT_VERSION, Ready, RunnerFacts
from servelite.ipc.progress import ProgressPage
from servelite.tokenizer.grammar import Grammars


def build_engine(
    settings: config.Settings,
    executor: Executor,
    mailbox: Mailbox,
    progress: ProgressPage,
    *,
    index: int = 0,
    epoch: int = 1,
    load_grammars: Callable[[], Grammars] | None = None,
) -> EngineCore:
    """The core over `executor`, speaking through `mailbox`.

    `load_grammars` reads the vocabulary, when the first grammar comes; None: grammars are refused.
    """
    facts = executor.facts
    outbox = Outbox(index, epoch)
    kv = KVCacheManager(
        facts.kv_groups,
        facts.num_blocks,
        facts.block_size,
        settings.max_num_seqs,
        facts.max_model_len,
        prefix_caching=settings.enable_prefix_caching and not facts.encoder,
    )
    requests = RequestLifecycle(
        RowTable(settings.max_num_seqs, facts.max_model_len),
        WaitingLimits(settings.max_waiting_requests, settings.max_waiting_tokens),
        kv,
        make_policy(settings.scheduling_policy),
        outbox,
        RequestGrammars(load_grammars, facts.vocab_size),
    )
    depth, budget = settings.async_depth, settings.max_num_batched_tokens
    scheduler = Scheduler(
        requests, kv, outbox, max_num_batched_tokens=budget, epoch=epoch, chunked=not facts.encoder
    )
    admission = Admission(facts, kv, depth * budget, _features(facts, load_grammars is not None))
    progress.begin_epoch(epoch)
    return EngineCore(
        scheduler, admission, executor, mailbox, outbox, progress, depth=depth, check=settings.debug
    )


def ready_message(
    settings: config.Settings,
    facts: RunnerFacts,
    ledger: Sequence[tuple[str, float]],
    *,
    index: int = 0,
    epoch: int = 1,
) -> Ready:
    """What the engine tells each front end that says hello."""
    return Ready(
        engine=index,
        epoch=epoch,
        contract=CONTRACT_VERSION,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        vocab_size=facts.vocab_size,
        dtype=facts.dtype,
        device=facts.device,
        executor=settings.executor,
        kv_groups=facts.kv_groups,
        features=_features(facts, grammars=True),
        ledger=tuple(ledger),
        pooling=facts.pooling,
        encoder=facts.encoder,
    )


def _features(facts: RunnerFacts, grammars: bool) -> tuple[str, ...]:
    """The runner's optional abilities, and the engine's own."""
    return (*facts.features, "grammar") if grammars else facts.features
