"""One life of the engine: its core and, with --tp, a process for each rank, which live and die together.

The ranks compute in lockstep and wait for one another, and for the core: without one of them the others
are of no use, and what they hold cannot be trusted. So the first death ends them all.
"""

from __future__ import annotations

from typing import Final

import msgspec

from servelite.config import Settings
from servelite.ipc.messages import Boot, ToChild
from servelite.ipc.progress import ProgressPage
from servelite.ipc.rank_group import close_group, open_group
from servelite.ipc.sockets import engine_address
from servelite.launcher.child import Child

_KILLED_WITH_IT: Final = "ended with the rest of its engine"


class EngineLife:
    """The processes of one life. Used by the thread that started them."""

    def __init__(self, boot: Boot, members: tuple[Child, ...] = ()) -> None:
        """`members`: the core first."""
        self.boot = boot
        self.members = members
        self.first_dead: Child | None = None
        """Whose death ended it; None while it lives."""
        self._group = boot.group

    @classmethod
    def start(cls, settings: Settings, folder: str, page: ProgressPage, epoch: int = 0) -> EngineLife:
        """
        Args:
            folder: of the server's sockets.
            epoch: which life it is, from 0.

        Raises:
            OSError: the system has no room for it; nothing of it is left.
        """
        group = open_group(settings.tp) if settings.tp > 1 else None
        fds = (page.fd, *(group.fds if group is not None else ()))
        boot = Boot(
            settings.to_dict(),
            index=0,
            epoch=epoch,
            engine_address=engine_address(folder, 0, epoch),
            progress_fd=page.fd,
            folder=folder,
            group=group,
        )
        life = cls(boot)
        try:
            life.members = (Child.start("engine", "servelite.engine", boot, fds),)
            for rank in range(settings.tp if group is not None else 0):
                life.members += (_start_rank(rank, boot, fds),)
        except BaseException:
            life.end()
            raise
        return life

    @property
    def core(self) -> Child:
        """The engine core's process."""
        return self.members[0]

    @property
    def ready(self) -> bool:
        """Whether a token could be produced, for all that is known."""
        return self.core.ready

    @property
    def alive(self) -> bool:
        """False once the last of them is reaped."""
        return any(member.alive for member in self.members)

    def send(self, message: ToChild) -> None:
        """A control message, to the core: ranks are told by the core alone."""
        self.core.send(message)

    def kill(self, why: str = "") -> None:
        """End it at once."""
        self.core.kill(why)

    def lost(self, member: Child) -> None:
        """`member` has been reaped: the others go too, and what they shared with the last."""
        if self.first_dead is None:
            self.first_dead = member
            for other in self.members:
                other.kill(_KILLED_WITH_IT)
        if not self.alive:
            self._close()

    def _close(self) -> None:
        if self._group is not None:
            close_group(self._group)
            self._group = None

    def end(self) -> None:
        """Kill and reap what is left of it; idempotent."""
        for member in self.members:
            if member.alive:
                member.kill()
                member.reap()
                self.lost(member)
        self._close()

    @property
    def died_from_inside(self) -> bool:
        """As `Child.died_from_inside`, of the one that died first."""
        return self.first_dead is not None and self.first_dead.died_from_inside

    def death(self) -> str:
        """How it died, in words."""
        assert self.first_dead is not None, "it is alive"
        death = self.first_dead.death()
        return death if self.first_dead is self.core else f"{self.first_dead.name}: {death}"


def _start_rank(rank: int, engine: Boot, fds: tuple[int, ...]) -> Child:
    boot = msgspec.structs.replace(engine, index=rank)
    share = engine.group.size if engine.group is not None else 1
    return Child.start(f"worker {rank}", "servelite.worker", boot, fds, share=share)
