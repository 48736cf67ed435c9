"""The ranks of the job as the checkpoint sees them: a gloo group of its own, or one process alone."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from .errors import CheckpointError
from .wire import ADDRESS_VARIABLE

T = TypeVar("T")

# Ranks may reach a collective this far apart: one may still be writing its shard to slow storage.
_PATIENCE = timedelta(minutes=30)
_numbers = itertools.count()


class Ranks:
    """Exchanges of small objects between all ranks; must be constructed by all of them."""

    def __init__(self) -> None:
        """Make the group; without torch.distributed this process is the only rank."""
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            # On the training's own group a save in the background would dead-lock against a barrier of the script.
            self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_PATIENCE))
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.number = next(_numbers)
        """Of those that this process has made; the same on all ranks."""
        here = node_name()
        self.local: tuple[int, ...] = tuple(r for r, there in enumerate(self.gather(here)) if there == here)
        """The ranks of this node, which share a keeper."""

    def check(self) -> None:
        """Raise if the process group came up only after this was made: the ranks would write over each other."""
        if self.group is None and dist.is_available() and dist.is_initialized():
            raise CheckpointError("the process group was initialised after the checkpointer was made: make it after init_process_group()")

    def _check_alive(self) -> None:
        if not dist.is_initialized():
            raise CheckpointError("the process group was destroyed while a checkpoint was being written: close the checkpointer first")

    def own_store(self) -> dist.Store:
        """A part of the store through which the ranks have met that nobody else uses."""
        return dist.PrefixStore(f"goodrun/{self.number}", dist.distributed_c10d._get_default_store())

    def gather(self, mine: T) -> list[T]:
        """What every rank gave, by rank, on every rank."""
        if self.group is None:
            return [mine]
        self._check_alive()
        everyone: list[T | None] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        return cast(list[T], everyone)

    def from_first(self, decide: Callable[[], T]) -> T:
        """What `decide` returns (or raises) on rank 0, on every rank; it runs on rank 0 only."""
        answer: T | None = None
        error: CheckpointError | None = None
        if self.rank == 0:
            try:
                answer = decide()
            except CheckpointError as e:
                error = e
            except Exception as e:  # the peers wait for an answer: whatever went wrong has to reach them
                error = CheckpointError(f"rank 0: {type(e).__name__}: {e}")
        if self.group is not None:
            self._check_alive()
            box = [answer, error]
            dist.broadcast_object_list(box, src=0, group=self.group)
            answer, error = cast("tuple[T | None, CheckpointError | None]", tuple(box))
        if error is not None:
            raise error
        return cast(T, answer)


def node_name() -> tuple[str, ...]:
    """What tells this node from every other: the same for all processes that can reach one keeper."""
    parts = [socket.gethostname(), os.environ.get(ADDRESS_VARIABLE, "")]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return tuple(parts)
