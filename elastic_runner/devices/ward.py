"""The devices of one run on this node: which slot is which, who is sick, who is set aside, and who may come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ..attempt import Attempt, Broken
from ..events import DeviceVerdict, Event
from ..policy import Kind, Slots
from .answers import Device
from .freeing import Freeing
from .health_policy import Do, HealthPolicy, Verdict
from .identity import Bound, bind
from .probation import Probation
from .watch import DeviceWatch

_LEDGER_EVERY_S = 5.0


class Ward:
    """Watches the devices of the slots in use, keeps the list of those left out, and brings them back."""

    def __init__(
        self,
        policy: HealthPolicy,
        watch: DeviceWatch | None,
        probation: Probation,
        *,
        record: Callable[[Event], object],
        say: Callable[[str], None],
        env: Mapping[str, str],
    ) -> None:
        """`watch` is None where no GPU is watched; `env` is that of the launcher."""
        self.bound: tuple[Bound, ...] = ()
        """The device of each slot; empty where slots are not devices."""
        self.tainted: Callable[[float, str], None] = lambda since_t, why: None
        """Told that what was saved since then may hold wrong numbers, and why."""
        self._alike = True
        self._policy, self._watch, self._probation, self._record, self._say, self._env = policy, watch, probation, record, say, env
        self._sick: dict[str, str] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._restart: tuple[Attempt, float, int, str] | None = None
        self._heard_t = time.monotonic()
        self._freeing = Freeing(watch.memory if watch is not None else lambda uuids, within_s: None, say)

    @property
    def pid(self) -> int:
        """The prober's process id; 0 while there is none."""
        return self._watch.pid if self._watch is not None else 0

    # -- at the start --------------------------------------------------------------------------------------------------

    def admit(self, slots: Slots, devices: tuple[Device, ...]) -> Slots:
        """The slots without those whose device is set aside on this node; too few may be left."""
        everyone = (*slots.active, *slots.spare)
        bound = bind(self._env, devices)
        self.bound = bound if len(bound) > max(everyone) else ()  # more slots than devices: they share them, as under torchrun
        self._alike = len({d.name for d in devices}) < 2
        for slot in everyone if self.bound else ():
            entry = self._probation.entry(self.bound[slot])
            if entry is None or not entry.out:
                continue
            self._say(f"slot {slot}, {self.bound[slot].words}, is set aside on this node ({entry.reason}); `goodrun devices` has the list")
            slots = slots.short_of(slot, entry.reason)
            self._probation.take_over(slot, self.bound[slot], entry)
        self.await_memory(slots.active)  # what others hold
        self._watch_those_of(slots)
        return slots

    def visible(self, active: tuple[int, ...]) -> tuple[str, ...] | None:
        """What CUDA_VISIBLE_DEVICES is to name for these slots in rank order; None leaves it as the user set it.

        It is left while all slots are in use, as torchrun would. Where the GPUs are not all of one kind, CUDA counts them in another
        order than the driver: then UUIDs alone say which slot is which.
        """
        if not self.bound or (self._alike and active == tuple(range(len(active)))):
            return None
        return tuple(self.bound[s].name for s in active)

    def await_memory(self, active: tuple[int, ...]) -> None:
        """Until the memory of these slots' devices is free of the ranks before, or the limit for that is over."""
        if self.bound and active:
            self._freeing.wait([self.bound[s] for s in active])

    def watched(self, slot: int) -> bool:
        """Whether the driver has answered about this slot's device: from then on its XIDs are heard."""
        return self._watch is not None and bool(self.bound) and self.bound[slot].uuid in self._watch.reports

    # -- while it runs -------------------------------------------------------------------------------------------------

    def look(self, attempt: Attempt, slots: Slots) -> Broken | None:
        """What a device's verdict makes of this attempt, if anything; never waits."""
        if self._watch is not None:
            for verdict in self._watch.look(alone=len(self.bound) == 1):
                if (broken := self._take(verdict, attempt, slots)) is not None:
                    return broken
            self.hear_operator(slots)
        for r in attempt.ranks:
            if self.bound and (reason := self._sick.get(self.bound[r.slot].uuid)):
                return attempt.device_to_blame(r.slot, Kind.SLOT_LOST, f"{self.bound[r.slot].words}: {reason}")
        if self._restart is not None and time.monotonic() >= self._restart[1]:
            of, _, slot, cause = self._restart
            self._restart = None
            if of is attempt and any(r.slot == slot and r.code is None for r in attempt.ranks):
                return attempt.device_to_blame(slot, Kind.DEVICE, cause)
        return None

    def well_t(self) -> float | None:
        """The last moment at which all devices in use were well for certain; None where none is watched."""
        return self._watch.well_t if self._watch is not None and self.bound else None

    def slow(self, slot: int, for_s: float) -> str:
        """The rank on this slot was slower than its peers for so long: what is known of its device, in words; it may be a strike."""
        if self._watch is None or not self.bound:
            return ""
        said = self._watch.slow(self.bound[slot].uuid, for_s)
        return f"{self.bound[slot].words}: {said}" if said else ""

    def fit(self, slots: Slots) -> Slots:
        """The slots without the spares that have fallen sick."""
        for slot in slots.spare:
            if self.bound and (reason := self._sick.get(self.bound[slot].uuid)):
                slots = slots.without(slot, reason) or slots
        return slots

    def left_out(self, slots: Slots) -> None:
        """Set aside what policy has left out: in the run always, in the node's ledger if its device was the reason."""
        for slot, reason in slots.out:
            if slot not in self._probation.aside:
                device = self.bound[slot] if self.bound else None
                self._probation.put(slot, device, reason, self._verdicts.get(device.uuid) if device is not None else None)
        self._watch_those_of(slots)

    def back(self, durable_step: int) -> tuple[int, ...]:
        """The slots to let in now: their term is over, they have passed their test, and there is a checkpoint since."""
        ready = self._probation.back(durable_step)
        for slot in ready:
            if self.bound:
                self._sick.pop(self.bound[slot].uuid, None)
                self._verdicts.pop(self.bound[slot].uuid, None)
        return ready

    def close(self) -> None:
        """End the prober and any test. A sick device of a job that could not go on without it is set aside for the next one."""
        for slot, device in enumerate(self.bound):
            if device.uuid in self._verdicts and slot not in self._probation.aside:
                self._probation.put(slot, device, "", self._verdicts[device.uuid])
        self._probation.close()
        if self._watch is not None:
            self._watch.close()

    # -- a verdict -----------------------------------------------------------------------------------------------------

    def _take(self, verdict: Verdict, attempt: Attempt, slots: Slots) -> Broken | None:
        found = verdict.finding
        slot = next((s for s in (*slots.active, *slots.spare) if self.bound and self.bound[s].uuid == found.device), -1)
        words = self.bound[slot].words if slot >= 0 else found.device
        self._record(
            DeviceVerdict(
                device=found.device,
                index=self.bound[slot].index if slot >= 0 else -1,
                slot=slot,
                condition=found.name,
                evidence=found.evidence,
                verdict=verdict.do.name,
                strikes=verdict.strikes,
                reason=verdict.reason,
            )
        )
        if verdict.taints and slot in slots.active:
            self.tainted(verdict.since_t, f"{words}: {verdict.reason}")
        text = f"{words}: {verdict.reason}" + (f" ({found.evidence})" if found.evidence and found.xid is None else "")
        if slot < 0 or verdict.do is Do.LOG:
            self._say(f"{text}: nothing is done")
        elif verdict.do is Do.RESTART:
            if self._restart is None or self._restart[0] is not attempt:
                self._restart = (attempt, time.monotonic() + self._policy.settle_s, slot, f"{words}: {verdict.reason}")
        elif verdict.do is Do.DRAIN:
            active = slot if slot in slots.active else slots.active[0]
            return attempt.device_to_blame(active, Kind.NODE_SICK, text)
        else:
            self._sick[found.device] = verdict.reason
            self._verdicts[found.device] = verdict
        return None

    def hear_operator(self, slots: Slots) -> None:
        """What `goodrun devices` was told to do meanwhile, or another job of this node has found out."""
        if not self.bound or time.monotonic() - self._heard_t < _LEDGER_EVERY_S:
            return
        self._heard_t = time.monotonic()
        for slot in (*slots.active, *slots.spare):
            entry = self._probation.entry(self.bound[slot])
            if entry is not None and entry.out:
                self._sick.setdefault(entry.device, f"{entry.reason} (set aside by {entry.by})")
        self._probation.hear_releases()

    def _watch_those_of(self, slots: Slots) -> None:
        if self._watch is not None and self.bound:
            self._watch.watch(list(dict.fromkeys(self.bound[s].uuid for s in (*slots.active, *slots.spare))))
