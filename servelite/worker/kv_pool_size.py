"""How many KV blocks there are, and how long a request may then be."""

from __future__ import annotations

import bisect
import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

from servelite.config import SettingError, Settings, flag_of
from servelite.kernels.collective import ONE_RANK, Collective

_log = logging.getLogger(__name__)

_MOST_BYTES = 4 << 30  # of all ranks together
_SHARE = 0.4
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number near 2^63


@dataclass(frozen=True)
class PoolSize:
    """What the KV manager gets to work with."""

    num_blocks: int
    max_model_len: int  # tokens; one request of this length fits the pool


def most_blocks(num_tokens: int, block_size: int, window: int, in_flight: int) -> int:
    """Blocks that one request of `num_tokens` tokens holds at the most in a KV group.

    Args:
        window: of the group, in tokens; 0: it keeps all blocks of a request.
        in_flight: tokens of steps in flight, which the group holds beside its window.
    """
    whole = -(-num_tokens // block_size)
    return min(whole, -(-(window - 1 + in_flight) // block_size) + 1) if window else whole


def size_pool(
    settings: Settings,
    model_len: int,
    block_bytes: int,
    available: int,
    windows: tuple[int, ...] = (0,),
    weights: int = 0,
    group: Collective = ONE_RANK,
) -> PoolSize:
    """
    Args:
        model_len: the longest sequence the model can take, in tokens.
        block_bytes: of one block, all layers of its KV group; a rank's part of it.
        available: bytes of memory that are free to use, the weights of all ranks loaded.
        windows: of each KV group, as for `most_blocks`.
        weights: bytes that a rank's weights take of what was available before.
        group: ranks that share the memory, each with a pool of its own. All are to be told the same numbers;
            one of them logs what there is to say.

    Raises:
        SettingError: the length asked for is above the model's or does not fit, or the memory asked for is
            not there; the text has the numbers.
    """
    if settings.max_model_len > model_len:
        raise SettingError(
            f"--max-model-len is {settings.max_model_len}, above the model's own length {model_len}"
        )
    length = settings.max_model_len or model_len
    size = settings.block_size
    in_flight = settings.async_depth * settings.max_num_batched_tokens

    def blocks_for(tokens: int) -> int:
        return sum(most_blocks(tokens, size, window, in_flight) for window in windows)

    blocks_per_request = blocks_for(length)
    blocks = settings.num_gpu_blocks_override
    if not blocks:
        most = _MOST_BYTES // group.size
        blocks = _pool_bytes(settings, available // group.size, weights, most) // block_bytes
    level = logging.DEBUG if group.rank else logging.WARNING
    usable = settings.max_num_seqs * blocks_per_request
    if blocks > usable and (settings.num_gpu_blocks_override or settings.kv_cache_memory_bytes):
        _log.log(
            level,
            "the KV pool gets %d blocks, not %d: %d requests of %d tokens use no more",
            usable, blocks, settings.max_num_seqs, length,
        )  # fmt: skip
    blocks = min(blocks, usable)
    free = available // group.size
    if settings.kv_cache_memory_bytes and blocks * block_bytes > free:
        raise SettingError(
            f"--kv-cache-memory-bytes is {settings.kv_cache_memory_bytes}: the KV pool would take "
            f"{blocks * block_bytes} bytes of memory, and {free} are available"
        )
    if blocks >= blocks_per_request:
        return PoolSize(blocks, length)
    whole_blocks = range(1, -(-length // size) + 1)
    fitting = bisect.bisect_right(whole_blocks, blocks, key=lambda count: blocks_for(count * size)) * size
    if settings.max_model_len or not fitting:
        raise SettingError(
            f"a request of {length} tokens needs {blocks_per_request} KV blocks "
            f"({blocks_per_request * block_bytes} bytes), the pool holds {blocks}: lower --max-model-len "
            f"or raise {_lever(settings)}"
        )
    _log.log(
        level,
        "max_model_len lowered from %d to %d: the KV pool holds %d blocks of %d tokens",
        length, fitting, blocks, size,
    )  # fmt: skip
    return PoolSize(blocks, fitting)


def size_without_memory(settings: Settings, model_len: int) -> PoolSize:
    """For an encoder: its blocks hold nothing, and there are as many as can be used.

    Args:
        model_len: as in `size_pool`. No prompt may be above the step's budget: it is computed in one.

    Raises:
        SettingError: the length asked for is above the model's or the budget, or memory is asked for.
    """
    for name in ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"):
        if getattr(settings, name):
            raise SettingError(f"{flag_of(name)} has no effect: the model is an encoder, without a KV cache")
    budget = settings.max_num_batched_tokens
    if settings.max_model_len > budget:
        raise SettingError(
            f"--max-model-len is {settings.max_model_len}, above --max-num-batched-tokens {budget}: an "
            "encoder computes a prompt in one step"
        )
    model_len = min(model_len, budget)
    blocks = settings.max_num_seqs * -(-(settings.max_model_len or model_len) // settings.block_size)
    return size_pool(dataclasses.replace(settings, num_gpu_blocks_override=blocks), model_len, 0, 0)


def _pool_bytes(settings: Settings, available: int, weights: int, most: int) -> int:
    if settings.kv_cache_memory_bytes:
        return settings.kv_cache_memory_bytes
    if share := settings.gpu_memory_utilization:
        return max(0, int((available + weights) * share) - weights)
    return min(most, int(available * _SHARE))


def _lever(settings: Settings) -> str:
    """The flag that a larger pool takes."""
    if settings.num_gpu_blocks_override:
        return "--num-gpu-blocks-override"
    return "--gpu-memory-utilization" if settings.gpu_memory_utilization else "--kv-cache-memory-bytes"


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still use: what the machine has available, within its cgroup's limit.

    A cgroup's page cache that can be dropped (`inactive_file`) counts as available. `root` stands
    for the file system's root.
    """
    numbers = (root / "proc/meminfo").read_text()
    machine = next(
        int(line.split()[1]) * 1024 for line in numbers.splitlines() if line.startswith("MemAvailable:")
    )
    return min([machine, *_cgroup_free(root)])


def _cgroup_free(root: Path) -> list[int]:
    """What is left in each memory cgroup the process is in, from its own up to the root's."""
    free = []
    for folder, limit_file, usage_file, cache_key in _cgroup_folders(root):
        try:
            limit = int((folder / limit_file).read_text())
            usage = int((folder / usage_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no limit here: the file is not there, or says "max"
            continue
        if limit < _UNLIMITED:
            free.append(max(0, limit - usage + int(stat.get(cache_key, 0))))
    return free


def _cgroup_folders(root: Path) -> list[tuple[Path, str, str, str]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = root / "sys/fs/cgroup"
            files = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path is often the host's and the mount shows our own cgroup at its top:
        # folders that are not there are passed over, the top is always asked.
        parts = Path(path.lstrip("/"))
        for folder in (base / parts, *(base / above for above in parts.parents)):
            found.append((folder, *files))
    return found
