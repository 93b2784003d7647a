"""How often the kernel has killed for memory in this process's cgroup."""

from __future__ import annotations

from pathlib import Path


def oom_kills(root: Path = Path("/")) -> int:
    """The `oom_kill` count of this process's cgroup (v2 and v1); 0 where none is told.

    `root` stands for the file system's root.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0
    counts = [0]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # In a container the path is often the host's, and the mount shows our own group at its top.
        counts += [_count(folder / name) for folder in (base / path.lstrip("/"), base)]
    return max(counts)


def _count(file: Path) -> int:
    try:
        pairs = dict(line.split() for line in file.read_text().splitlines())
        return int(pairs.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
