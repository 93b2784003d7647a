"""The kernel's count of kills for memory."""

from __future__ import annotations

from pathlib import Path

from servelite.launcher.oom import oom_kills


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_v2(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path / "sys/fs/cgroup/a/b/memory.events", "low 0\noom 3\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2


def test_cgroup_v2_in_a_container_whose_mount_shows_its_own_group_on_top(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/docker/abc\n")
    write(tmp_path / "sys/fs/cgroup/memory.events", "oom_kill 1\n")
    assert oom_kills(tmp_path) == 1


def test_cgroup_v1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "7:cpu,cpuacct:/x\n4:memory:/job\n")
    write(tmp_path / "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 5\n")
    assert oom_kills(tmp_path) == 5


def test_without_a_cgroup_there_are_none(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0
    assert oom_kills() >= 0
