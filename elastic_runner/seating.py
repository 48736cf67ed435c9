"""Which device slots the ranks have: who is left out, who comes back, and what is waited for while there are too few."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from .attempt import Attempt, Broken
from .devices.ward import Ward
from .errors import GoodrunError
from .policy import Action, Do, Slots, grow
from .signals import Signals
from .slots import visible_devices

_LOOK_EVERY_S = 0.1


class NoDevices(GoodrunError):
    """Too few slots are left, and none came back in time: the machine's fault, and the scheduler's turn."""


@dataclass(kw_only=True)
class Seating:
    """The slots of one run on this node, in step with the ward of their devices."""

    slots: Slots
    size: int
    """How many are in use at the start, and at most."""
    ward: Ward | None
    signals: Signals
    notice: Callable[[str], None]
    decided: Callable[[Action], None]
    """Told of each decision that is made here."""
    wait_s: float
    """How long too few slots are borne."""

    def visible(self) -> tuple[str, ...]:
        """What CUDA_VISIBLE_DEVICES is to name in rank order; empty leaves it as the user set it."""
        devices = self.ward.visible(self.slots.active) if self.ward is not None else None
        return visible_devices(self.slots.active, os.environ, _device_count()) if devices is None else devices

    def sick(self, attempt: Attempt) -> Broken | None:
        """What a device's verdict makes of this attempt, if anything; never waits."""
        if self.ward is None:
            return None
        self.slots = self.ward.fit(self.slots)
        return self.ward.look(attempt, self.slots)

    def growth(self, durable_step: int) -> Action | None:
        """How to go on with the slots that are well again and can be let in now, if that takes a restart."""
        back = self.ward.back(durable_step) if self.ward is not None else ()
        if not back:
            return None
        action = grow(self.slots, back, self.size)
        if action.do is Do.GROW:
            return action
        self.take(action.slots)
        self.notice(action.reason)
        return None

    def restart(self, slots: Slots) -> None:
        """Between two attempts: go on with these, once their devices have the memory back that their ranks had, and there are enough."""
        if self.ward is not None:
            with self.signals.waiting("GPU memory to be given back"):
                self.ward.await_memory(slots.active)
        self.take(slots)
        self.wait()

    def take(self, slots: Slots) -> None:
        """Go on with these, and set aside those that are left out."""
        self.slots = slots
        if self.ward is not None:
            self.ward.left_out(slots)

    def begin(self) -> None:
        """Before the first attempt: other runs may have set aside so much that too little is left. Raises what `wait` does."""
        if self.slots.suffice:
            return
        shape = f"--min-nproc {self.slots.min_nproc}, --world-size-multiple-of {self.slots.multiple_of}"
        few = f"{len(self.slots.active)} of {self.size} slots are left, too few to begin with ({shape})"
        if not self.wait_s:
            raise NoDevices(f"{few}: wait for a re-test with --wait-for-devices, or let one in with `goodrun devices release`")
        self.notice(f"{few}: waiting for a device")
        self.wait()

    def wait(self) -> None:
        """Until there are enough. Raises NoDevices when the time for that is over, and what a stop signal asks for."""
        if not self.slots.suffice:
            with self.signals.waiting("a device to come back"):
                self._wait(time.monotonic() + self.wait_s)
            self.notice(f"going on with {len(self.slots.active)} ranks")

    def _wait(self, until_t: float) -> None:
        asks = sys.maxsize // 2
        while not self.slots.suffice:
            asks += 1  # nothing runs: there is no checkpoint to wait for, so each question counts as one
            if self.ward is not None:
                self.ward.hear_operator(self.slots)
            if self.ward is not None and (back := self.ward.back(asks)):
                self.take(self.slots.with_back(back, self.size))
            elif time.monotonic() > until_t:
                reason = f"no device came back within {self.wait_s:.0f} s (--wait-for-devices)"
                self.decided(Action(do=Do.GIVE_UP, slots=self.slots, reason=reason))
                raise NoDevices(reason)
            time.sleep(_LOOK_EVERY_S)  # a re-test is a process that is looked after here


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()
