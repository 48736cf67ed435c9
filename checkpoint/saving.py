"""The path of a save in a rank: plan once, copy the own part into a free slot, tell the keeper."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from weakref import WeakMethod

import torch

from .. import progress
from .errors import CheckpointError, CheckpointFenced
from .fence import Token
from .link import Link, Said, file_limit, installed
from .pending import Fate, PendingSave
from .places import Where, absolute
from .planning import Captured, Planned
from .ranks import Ranks
from .retention import Keep
from .slots import Slot
from .url import Url
from .vouching import own_word
from .wire import Message

WHEN_BUSY = ("wait", "skip", "replace")
_EXIT_LIMIT_S = 600.0
"""How long the end of the process waits for a save; storage that takes longer is taken for dead."""


class Saver:
    """Takes snapshots of one directory's state; all ranks call it alike."""

    def __init__(self, directory: Where, keep: Keep, ranks: Ranks, when_busy: str, token: Callable[[], Token]) -> None:
        """`token` makes the ranks agree on the attempt's token. Nothing is started yet."""
        self._keep, self._ranks, self._when_busy, self._token = keep, ranks, when_busy, token
        self.link = Link(absolute(directory), WeakMethod(self._hello), WeakMethod(self._tell_again), ranks.rank)
        self._planned = Planned(ranks, self.link)
        self._count = ranks.number << 32  # the keeper may still have those of a checkpointer that this process had before
        self._pid = os.getpid()
        self._copying: list[threading.Thread] = []
        self._telling = threading.Lock()
        self._open: dict[int, Fate] = {}
        self.last: Fate | None = None

    def prepare(self, state: Captured) -> None:
        """Plan for this state and have the slots made, ahead of the first save."""
        self._planned.prepare(state, self._replans)

    def _replans(self) -> None:
        self._await_copies()
        self._token()

    def _await_copies(self) -> None:
        """Slots may be given back when nothing is on its way into them."""
        for copying in self._copying:
            copying.join()

    def _hello(self) -> Message:
        ranks = self._ranks
        return {
            "op": "hello",
            "directory": str(self.link.directory),
            "token": self._token(),
            "rank": ranks.rank,
            "world": ranks.size,
            "local": ranks.local,
            "keep": asdict(self._keep),
            "torch": torch.__version__,
            "fsize": file_limit(),
            "packages": installed() if isinstance(self.link.directory, Url) else [],
        }

    def _tell_again(self, link: Link) -> None:
        """The keeper died and there is a new one: give it the slots and the snapshots that are not durable yet."""
        line = link.up()
        self._planned.send()
        with self._telling:
            for slot in self._planned.slots:
                if (fate := self._open.get(slot.number)) is not None and slot.whole:
                    line.send({**self._given(fate, slot), "again": True})

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Captured, *, when_busy: str | None = None) -> PendingSave:
        """Take a snapshot. Returns when the copy is done; what becomes of it the handle tells."""
        self._count += 1
        before, self.last = self.last, Fate(step, self._count, begun_t=time.monotonic())
        fate, pending = self.last, PendingSave(self.last, self.listen)
        atexit.register(self._at_exit)
        try:
            self.prepare(state)
            if state.fault is not None:
                self._open[fate.number] = fate
                why = f"step {step} was not saved to {self.link.directory}: rank {self._ranks.rank}: {state.fault}"
                self.link.send({"op": "fault", "number": fate.number, "step": step, "why": why})
                return pending
            self._planned.await_slots(self.listen)
            if not self._may(fate, when_busy or self._when_busy):
                self.last = before  # what the job ends with is decided by the last save that was taken
                return PendingSave(Fate(step, fate.number, Said(), seen=True), self.listen, skipped=True)
            slot = self._free_slot()
            self._open[fate.number] = fate
            queued = slot.fill(fate.number, state.tensors, state.values)
            if queued is None:
                self.link.send(self._given(fate, slot))
            else:
                copying = threading.Thread(target=self._give_when_whole, args=(fate, slot, queued), name="goodrun-copy", daemon=True)
                self._copying = [*(c for c in self._copying if c.is_alive()), copying]
                copying.start()
        except CheckpointError as e:
            self._open.pop(fate.number, None)
            fate.said = Said(why=f"step {step} was not saved to {self.link.directory}: {e}")
        return pending

    def _give_when_whole(self, fate: Fate, slot: Slot, queued: Callable[[], None]) -> None:
        """A thread's work: wait for the GPU, then tell the keeper. If that is gone, `_tell_again` tells the one that takes its place."""
        queued()
        with self._telling:
            slot.seal()
            self.link.tell(self._given(fate, slot))

    def _given(self, fate: Fate, slot: Slot) -> Message:
        message: dict[str, Any] = {"op": "given", "number": fate.number, "step": fate.step, "layout": self._planned.name}
        return message | {"slot": self._planned.slots.index(slot), "values": slot.values, "word": own_word()}

    def _may(self, fate: Fate, how: str) -> bool:
        """Whether this snapshot is to be taken where slots may be busy; one decision for all ranks."""
        if how == "wait":
            return True
        if self._ranks.size == len(self._ranks.local):
            return self._ask(fate, how)
        return self._ranks.from_first(lambda: self._ask(fate, how))  # each node has a keeper of its own: rank 0's decides

    def _ask(self, fate: Fate, how: str) -> bool:
        self.link.send({"op": "may", "number": fate.number, "step": fate.step, "how": how, "slots": len(self._planned.slots)})
        while fate.number not in self.link.decided:
            self.listen(1.0)
        return self.link.decided.pop(fate.number)

    def _free_slot(self) -> Slot:
        self.listen(0.0)
        while True:
            free = [slot for slot in self._planned.slots if slot.number not in self._open]
            if free:
                return min(free, key=lambda slot: slot.number)
            self.listen(1.0)

    # -- listening -----------------------------------------------------------------------------------------------------

    def listen(self, timeout_s: float) -> None:
        """Take in what the keeper has said; waits up to `timeout_s` for it to say anything."""
        while self.link.hear(timeout_s):
            timeout_s = 0.0
        page = progress.page()
        for number in list(self.link.said):
            said, fate = self.link.said.pop(number), self._open.pop(number, None)
            if fate is not None:
                fate.said, fate.ended_t = said, time.monotonic()
                if said.path and page is not None:
                    page.durable(fate.step)
                if fate is not self.last and said.why and not fate.seen and not said.replaced:
                    self._report(fate)
        if self.last is not None and self.last.settled:
            atexit.unregister(self._at_exit)
        for trouble in self.link.troubles:
            if self._ranks.rank == min(self._ranks.local):
                print(f"goodrun: {trouble}", file=sys.stderr, flush=True)
        self.link.troubles = []

    def _report(self, fate: Fate) -> None:
        if self._ranks.rank == 0 and not fate.reported:
            print(f"goodrun: {fate.error}; training goes on", file=sys.stderr, flush=True)
        fate.reported = True

    def check(self) -> None:
        """Say what went wrong with saves that have ended; a failed save never ends the training, but being replaced does."""
        self._planned.peek(self.listen)
        if self._open:
            self.listen(0.0)
        if self.last is not None and not self.last.seen and self.last.error is not None:
            if isinstance(self.last.error, CheckpointFenced):
                self.last.seen = True
                raise self.last.error
            self._report(self.last)

    def wait(self) -> None:
        """Wait until nothing is being written; raise CheckpointError if the last save failed."""
        self._hurry()
        begin, said = time.monotonic(), 0
        while self._open:
            self.listen(1.0)
            if self._ranks.rank == 0 and time.monotonic() - begin > 5 * (said + 1):
                said += 1
                steps = ", ".join(str(p.step) for p in self._open.values())
                print(f"goodrun: waiting for step {steps} to be written ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
        if self.last is not None and not self.last.seen:
            PendingSave(self.last, self.listen).result()

    def _hurry(self) -> None:
        if self._open:
            self.link.send({"op": "closing"})

    def _at_exit(self) -> None:
        """The end of the process: a job whose last checkpoint is missing must not report success."""
        last = self.last
        if last is None or last.seen or os.getpid() != self._pid:
            return
        try:
            self._hurry()
            PendingSave(last, self.listen).result(_EXIT_LIMIT_S)
            return
        except TimeoutError:
            why = f"the save of step {last.step} was still not written {_EXIT_LIMIT_S:.0f} s after the script's end"
        except CheckpointError as e:
            why = str(e)
        print(f"goodrun: {why}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exit handler cannot change the exit status any other way

    def close(self) -> None:
        """Hang up, and give the slots back."""
        if self.last is None or self.last.settled:
            atexit.unregister(self._at_exit)
        self._await_copies()
        self.link.close()
        self._planned.release()

    __del__ = close
