"""The order of samples as a function of (seed, epoch, position), whatever the number of ranks that share the work."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from .. import progress
from .errors import CheckpointMismatch
from .rehearsal import SampleLog
from .rng import mixed


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler whose whole state is one position: `DataLoader(data, batch_sampler=sampler, generator=torch.Generator())`.

    Each step takes the next `global_batch` samples of the epoch's order; rank r takes the r-th of `world_size` contiguous parts, as even as
    can be. Every rank makes the same number of steps, and every sample of an epoch is used exactly once over any series of world sizes
    (but for a short last batch under `drop_last`).

    Parts can differ in size, so multiply the rank's mean loss by `sampler.weight`: then the mean of the gradients over the ranks (what DDP
    takes) is exactly the mean over the global batch. Where the last batch has fewer samples than there are ranks, a rank without one gets
    a sample of another to keep step; its weight is 0, and it does not count as used.

    The position moves when a batch has been trained on, not when a worker of the loader fetches it: `Checkpointer.step(n)` calls
    `consumed()` for every sampler among its state. Without a Checkpointer, or for all but the last micro-batch of a step when gradients are
    accumulated, call it yourself. The epoch ends by itself: after its last batch the state is the start of the next one, so
    `for epoch in range(sampler.epoch, epochs): for batch in loader: …` resumes right at any point. The generator given to the loader
    keeps it from drawing on torch's own at every start, which a resumed run has one more of.
    """

    def __init__(
        self,
        dataset_or_len: Sized | int,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        """`global_batch`: samples per step over all ranks. Rank and world size are the process group's (or the launcher's) by default."""
        self._length = dataset_or_len if isinstance(dataset_or_len, int) else len(dataset_or_len)
        if world_size is None:
            world_size = dist.get_world_size() if _initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if rank is None:
            rank = dist.get_rank() if _initialized() else int(os.environ.get("RANK", "0"))
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not a rank of world_size={world_size}")
        if global_batch < world_size:
            raise ValueError(f"global_batch={global_batch} leaves some of {world_size} ranks without a sample: take at least {world_size}")
        if self._length < (global_batch if drop_last else 1):
            raise ValueError(f"a dataset of {self._length} samples has no batch of {global_batch} (drop_last={drop_last})")
        self._global_batch, self._seed, self._shuffle, self._drop_last = global_batch, seed, shuffle, drop_last
        self._rank, self._world = rank, world_size
        self._epoch = self._position = 0
        self._log, self._ordered = SampleLog.of_process(rank), (-1, list[int]())
        if (page := progress.page()) is not None:
            page.batch_sizes(whole=global_batch)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch to be consumed."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many samples of this epoch are consumed."""
        return self._position

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self._global_batch

    @property
    def epoch_length(self) -> int:
        """Batches of a whole epoch."""
        return self._batches_in(self._length)

    @property
    def weight(self) -> float:
        """What this rank's mean loss counts for in the batch being trained on (the first one not consumed yet): 1.0 in an even split."""
        whole = self._size_at(self._position)
        return self._part(whole)[1] * self._world / whole

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; in the epoch where the sampler is already, nothing happens, so a resumed position stays."""
        if epoch < self._epoch:
            raise ValueError(f"set_epoch({epoch}): epoch {epoch} is over; let the loop begin at sampler.epoch, which is {self._epoch}")
        if epoch > self._epoch:
            self._epoch, self._position = epoch, 0

    def consumed(self) -> None:
        """One batch has been trained on."""
        if self._log is not None:
            self._write_down(self._log)
        self._position += self._size_at(self._position)
        self._turn_over()

    def __len__(self) -> int:
        """Batches left in this epoch."""
        return self._batches_in(self._length - self._position)

    def _batches_in(self, samples: int) -> int:
        return samples // self._global_batch if self._drop_last else -(-samples // self._global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's part of each batch from the position on to the end of the epoch."""
        # The start is fixed now, not when a loader first asks: the position may move while batches are being fetched.
        return self._batches(self._order(), self._position)

    def _batches(self, order: list[int], at: int) -> Iterator[list[int]]:
        while whole := self._size_at(at):
            start, count = self._part(whole)
            yield order[at + start : at + start + count] if count else [order[at]]
            at += whole

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "length": self._length, "shuffle": self._shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there; another order of samples than the one saved is refused. The global batch may differ."""
        for name, mine in (("seed", self._seed), ("length", self._length), ("shuffle", self._shuffle)):
            if state[name] != mine:
                raise CheckpointMismatch(
                    f"the sampler was saved with {name}={state[name]}, this one has {name}={mine}: "
                    "its position would be one in another order of samples; give it the same data and seed"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._turn_over()

    def _write_down(self, log: SampleLog) -> None:
        if self._ordered[0] != self._epoch:
            self._ordered = self._epoch, self._order()
        start, count = self._part(self._size_at(self._position))
        begin = self._position + start
        log.trained(self._epoch, self._position, self._ordered[1][begin : begin + count])

    def _turn_over(self) -> None:
        if not self._size_at(self._position):
            self._epoch, self._position = self._epoch + 1, 0

    def _size_at(self, position: int) -> int:
        left = self._length - position
        return 0 if self._drop_last and left < self._global_batch else min(self._global_batch, left)

    def _part(self, whole: int) -> tuple[int, int]:
        """Where this rank's part of a batch of `whole` samples begins, and how many it has."""
        each, more = divmod(whole, self._world)
        return self._rank * each + min(self._rank, more), each + (self._rank < more)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed(mixed(self._seed, self._epoch))
        return torch.randperm(self._length, generator=generator).tolist()


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
