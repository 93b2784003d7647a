"""The KV pool's size: what decides it, what refuses, and the memory a cgroup leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from servelite.config import SettingError, Settings
from servelite.worker.kv_pool_size import PoolSize, available_memory, size_pool

MIB = 1 << 20
GIB = 1 << 30


def test_by_memory_it_is_a_share_of_what_is_available_up_to_a_limit() -> None:
    settings = Settings(max_num_seqs=512)
    assert size_pool(settings, 8192, MIB, 5 * GIB) == PoolSize(2048, 8192)
    assert size_pool(settings, 8192, MIB, 500 * GIB) == PoolSize(4096, 8192)


def test_bytes_win_over_the_share_and_blocks_over_bytes() -> None:
    by_bytes = Settings(kv_cache_memory_bytes=600 * MIB)
    assert size_pool(by_bytes, 8192, MIB, GIB) == PoolSize(600, 8192)
    by_blocks = Settings(kv_cache_memory_bytes=600 * MIB, num_gpu_blocks_override=700)
    assert size_pool(by_blocks, 8192, MIB, GIB) == PoolSize(700, 8192)


def test_more_bytes_than_there_are_is_refused_unless_the_rows_cannot_use_them() -> None:
    much = Settings(kv_cache_memory_bytes=10**12, max_model_len=8192, max_num_seqs=4)
    assert size_pool(much, 8192, MIB, 2 * GIB) == PoolSize(4 * 512, 8192)
    with pytest.raises(SettingError, match=r"bytes is 10{12}: .* take 2147483648 bytes .* 1073741824 are av"):
        size_pool(much, 8192, MIB, GIB)


def test_a_share_given_holds_for_weights_and_pool_together() -> None:
    half = Settings(max_num_seqs=512, gpu_memory_utilization=0.5)
    assert size_pool(half, 8192, MIB, 9 * GIB, weights=GIB) == PoolSize(4096, 8192)  # (9 + 1) / 2 - 1 GiB
    with pytest.raises(SettingError, match=r"the pool holds 0: .* or raise --gpu-memory-utilization"):
        size_pool(Settings(gpu_memory_utilization=0.1), 8192, MIB, 4 * GIB, weights=GIB)


def test_it_never_exceeds_what_the_rows_can_use() -> None:
    settings = Settings(max_num_seqs=3, max_model_len=40, num_gpu_blocks_override=1000)
    assert size_pool(settings, 8192, MIB, GIB) == PoolSize(9, 40)


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused_with_the_numbers() -> None:
    settings = Settings(max_model_len=1000, num_gpu_blocks_override=50)
    with pytest.raises(SettingError, match=r"of 1000 tokens needs 63 KV blocks .* the pool holds 50"):
        size_pool(settings, 8192, MIB, GIB)


def test_a_length_that_was_not_asked_for_is_lowered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert size_pool(Settings(num_gpu_blocks_override=50), 8192, MIB, GIB) == PoolSize(50, 800)
    assert "lowered from 8192 to 800" in caplog.text


def test_a_window_group_needs_its_window_and_what_is_in_flight() -> None:
    """Blocks of 16; a window of 64 with 32 tokens in flight holds ceil(95 / 16) + 1 = 7 blocks."""
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "async_depth": 2}
    windows = (0, 64)
    roomy = Settings(max_model_len=800, num_gpu_blocks_override=9999, **few)
    assert size_pool(roomy, 8192, MIB, GIB, windows) == PoolSize(4 * (50 + 7), 800)
    short = Settings(max_model_len=80, num_gpu_blocks_override=9999, **few)
    assert size_pool(short, 8192, MIB, GIB, windows) == PoolSize(4 * (5 + 5), 80)
    lowered = Settings(num_gpu_blocks_override=57, **few)
    assert size_pool(lowered, 8192, MIB, GIB, windows) == PoolSize(57, 800)
    with pytest.raises(SettingError, match=r"of 801 tokens needs 58 KV blocks .* holds 57"):
        size_pool(Settings(max_model_len=801, num_gpu_blocks_override=57, **few), 8192, MIB, GIB, windows)


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(SettingError, match="the pool holds 0"):
        size_pool(Settings(kv_cache_memory_bytes=1000), 8192, MIB, GIB)


def test_a_length_above_the_models_is_refused() -> None:
    with pytest.raises(SettingError, match="--max-model-len is 9000, above the model's own length 8192"):
        size_pool(Settings(max_model_len=9000), 8192, MIB, GIB)


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, proc__meminfo="MemTotal: 32000000 kB\nMemAvailable:   16000000 kB\nSwapTotal: 0 kB\n")
    return tmp_path


def cgroup(root: Path, folder: str, **files: str) -> None:
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / folder / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_a_cgroup_it_is_the_machines(root: Path) -> None:
    assert available_memory(root) == 16000000 * 1024


def test_cgroup_v2(root: Path) -> None:
    write(root, proc__self__cgroup="0::/a/b\n")
    stat = f"anon 1\ninactive_file {30 * MIB}\n"
    cgroup(root, "a/b", memory__max="max\n", memory__current="1\n", memory__stat=stat)
    cgroup(root, "a", memory__max=f"{GIB}\n", memory__current=f"{100 * MIB}\n", memory__stat=stat)
    assert available_memory(root) == GIB - 70 * MIB


def test_cgroup_v2_in_a_container_whose_mount_shows_its_own_group_on_top(root: Path) -> None:
    write(root, proc__self__cgroup="0::/docker/abc\n")
    cgroup(
        root, "", memory__max=f"{GIB}\n", memory__current=f"{GIB // 2}\n", memory__stat="inactive_file 0\n"
    )
    assert available_memory(root) == GIB // 2


def test_cgroup_v1(root: Path) -> None:
    write(root, proc__self__cgroup="7:cpu,cpuacct:/x\n4:memory:/job\n")
    stat = f"inactive_file 5\ntotal_inactive_file {MIB}\n"
    no_limit = f"{2**63 - 4096}\n"
    cgroup(
        root,
        "memory/job",
        memory__limit_in_bytes="2147483648",
        memory__usage_in_bytes="1048576",
        memory__stat=stat,
    )
    cgroup(root, "memory", memory__limit_in_bytes=no_limit, memory__usage_in_bytes="9", memory__stat=stat)
    assert available_memory(root) == 2 * GIB


def test_a_group_past_its_limit_leaves_nothing(root: Path) -> None:
    write(root, proc__self__cgroup="0::/\n")
    cgroup(root, "", memory__max="1000\n", memory__current="5000\n", memory__stat="inactive_file 0\n")
    assert available_memory(root) == 0


def test_this_machine_has_some() -> None:
    assert available_memory() > 100 * MIB
