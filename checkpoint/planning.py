"""The plan that all ranks share and the slots that this rank copies into: made once, and anew only when the state has another shape."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .codec import Encoder, Place, Tree
from .errors import CheckpointError
from .gpu import GpuCopies, on_gpu
from .layout import Layout, make_layout, signature_of
from .link import Link
from .memory import SlotShape
from .ranks import Ranks
from .slots import Slot, fds_of


@dataclass(frozen=True)
class Captured:
    """The state as the objects gave it: tensors not copied yet, all else as JSON. `fault` says why it could not be had."""

    tensors: dict[str, torch.Tensor]
    paths: dict[str, tuple[str | int, ...]]
    values: bytes = b""
    entries: tuple[str, ...] = ()
    fault: str | None = None


def capture(tree: Mapping[str, Tree], place: Callable[[str, torch.Tensor], Place]) -> Captured:
    """Turn a state into what is copied and what is written as text."""
    encoder = Encoder(place)
    try:
        values = {name: encoder.encode(value, name) for name, value in tree.items()}
        return Captured(encoder.shared, encoder.paths, json.dumps(values).encode(), tuple(values))
    except Exception as e:  # whatever the script's objects do: the peers have to learn that this rank cannot save
        return Captured({}, {}, fault=str(e) if isinstance(e, CheckpointError) else f"{type(e).__name__}: {e}")


class Planned:
    """This rank's layout and slots."""

    def __init__(self, ranks: Ranks, link: Link) -> None:
        """Nothing is planned yet."""
        self._ranks, self._link = ranks, link
        self._layout: Layout | None = None
        self._shape = SlotShape(0, 0)
        self._gpu: GpuCopies | None = None
        self._entries: tuple[str, ...] = ()
        self._plans = ranks.number << 32
        self.slots: list[Slot] = []

    @property
    def name(self) -> str:
        """The layout's name."""
        assert self._layout is not None
        return self._layout.name

    def prepare(self, state: Captured, agree: Callable[[], object]) -> None:
        """Plan for this state and have the slots made, if that has not been done; a collective where the state's shape is new.

        `agree` is called by all ranks before each plan, when the slots of the last one are still there.
        """
        if self._fits(state):
            return
        faults = [f"rank {r}: {fault}" for r, fault in enumerate(self._ranks.gather(state.fault)) if fault]
        if faults:
            raise CheckpointError(faults[0])
        agree()
        self._plans += 1
        self._layout = make_layout(state.tensors, state.paths, self._ranks, self._plans)
        # The text of other steps may be longer: numbers grow.
        most = max(self._ranks.gather(len(state.values)))
        self._shape, self._entries = SlotShape(self._layout.size, max(1 << 16, 2 * most)), state.entries
        if self._gpu is None and any(on_gpu(t) for t in state.tensors.values()):
            self._gpu = GpuCopies()
        slots, self.slots = self.slots, []
        for slot in slots:
            slot.release()
        self._link.slots.pop(self._layout.name, None)
        self.send()

    def _fits(self, state: Captured) -> bool:
        if self._layout is None:
            return False
        if state.fault is not None:
            return True  # this save is lost, the plan is not
        return len(state.values) <= self._shape.values and signature_of(state.tensors) == self._layout.signature

    def send(self) -> None:
        """Tell the keeper; one that took another's place gets the slots along."""
        layout = self._layout
        if layout is None:
            return
        items = [(p.raw_at, p.piece.nbytes, [p.raw_at + p.piece.nbytes + seal for seal in p.wrapping.seals]) for p in layout.placed]
        message = {"op": "layout", "layout": layout.name, "shard": self._shape.shard, "values": self._shape.values, "items": items}
        message |= {"index": len(layout.index), "entries": self._entries}
        self._link.send(message, layout.index + layout.metadata, fds_of(self.slots))

    def await_slots(self, listen: Callable[[float], None]) -> None:
        """Until the keeper has made the slots and this rank has them ready: beside the first steps, if there were any."""
        assert self._layout is not None
        while not self.slots:
            if self._layout.name in self._link.slots:
                fds, why = self._link.slots.pop(self._layout.name)
                if not fds:
                    self._layout = None  # the next save asks again
                    raise CheckpointError(why)
                if why:
                    print(f"goodrun: one slot in place of two, so saves wait for each other: {why}", file=sys.stderr, flush=True)
                self.slots = [Slot(fd, self._shape, self._layout, self._gpu) for fd in fds]
            else:
                listen(1.0)
        for slot in self.slots:
            slot.ready()

    def peek(self, listen: Callable[[float], None]) -> None:
        """Take the slots as soon as they are there, so that they get ready beside the steps; never waits."""
        if self._layout is not None and not self.slots:
            listen(0.0)
            if self._layout.name in self._link.slots and self._link.slots[self._layout.name][0]:
                fds, why = self._link.slots[self._layout.name]
                if not why:
                    del self._link.slots[self._layout.name]
                    self.slots = [Slot(fd, self._shape, self._layout, self._gpu) for fd in fds]

    def release(self) -> None:
        """Give the slots back."""
        for slot in self.slots:
            slot.release()
        self.slots, self._layout = [], None
