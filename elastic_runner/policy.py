"""Decides what happens after a failure: a pure function of what is known, the budgets and now. No torch, no os, no clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Kind(str, Enum):
    """Of what nature the first failure of an attempt was."""

    EXCEPTION = "exception"  # the script raised, or left with a status of its own choosing
    SIGNAL = "signal"  # something killed the process: the kernel, an operator, a crash in native code
    HANG = "hang"  # a detector named the rank
    LEFT = "left"  # the rank ended with 0 while its peers went on waiting for it
    STORAGE = "storage"  # storage did not take the last snapshot, which lies on this node's disk
    TEARDOWN = "tear-down"  # every rank had made its last step, one had ended with 0, and another could not finish
    SLOT_LOST = "slot-lost"  # the device slot is known to be gone, or is not to be used
    DEVICE = "device"  # the slot's device reported what only a new start of the script mends
    NODE_SICK = "node-sick"  # no device of this node is to be used
    NUMBERS = "numbers"  # the script's loss is not finite
    REPLICAS = "replicas"  # a model that must be the same on every rank is not
    CONNECTION = "connection"  # the rank lost its connection to a peer, and no peer on this node is dead: another node, or the network
    PEER = "peer"  # the membership changed: nobody is to blame


class Do(str, Enum):
    """The answers."""

    RESTART = "restart"
    RESTART_WITHOUT = "restart without"
    GROW = "grow"
    WAIT = "wait"
    CONTINUE = "continue"
    GIVE_UP = "give up"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One attempt's first failure. `t`: monotonic seconds; `step` counts over the whole job, None where the script does not number it."""

    t: float
    kind: Kind
    slot: int
    rank: int
    step: int | None = None
    started: bool = True
    """False if no rank had finished a step, nor run longer than a start takes: the script never got going."""
    message: str = ""
    unnumbered: int = 0
    """Steps that the attempt finished, where the script does not number them over the job: progress, as far as one can see."""
    shared: bool = False
    """Whether ranks on other nodes change places with this one's in the next attempt, if numbers went bad."""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """How much of each kind is borne. Counts are consecutive failures without progress, unless said otherwise."""

    max_restarts: int | None = None
    """The user's `--max-restarts`: a cap over everything but preemption; None leaves it to the budgets below."""
    failed_starts: int = 2
    """Starts of a script that ends by itself before its first step."""
    same_step_crashes: int = 2
    """Crashes by exception or exit status at the same step."""
    without_progress: int = 10
    """Failures of the infrastructure with no new step between them."""
    unnumbered: int = 100
    """Failures in all of a script that does not number its steps: whether it makes progress cannot be seen."""
    detections: int = 5
    """Restarts made by hang detectors with no new step between them."""
    strikes: int = 3
    """Consecutive attempts first failed by one slot, within `strike_window_s`, before it is left out."""
    strike_window_s: float = 600.0
    waits: bool = False
    """Whether to wait for a slot to come back where those that are left cannot go on."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The device slots of this node: those in use, in rank order, those kept in reserve, those left out with the reason."""

    active: tuple[int, ...]
    spare: tuple[int, ...] = ()
    out: tuple[tuple[int, str], ...] = ()
    min_nproc: int = 1
    multiple_of: int = 1

    def without(self, slot: int, reason: str) -> Slots | None:
        """These slots with `slot` left out and a spare, if there is one, in its place; None if too few would remain."""
        if slot in self.spare:
            return replace(self, spare=tuple(s for s in self.spare if s != slot), out=(*self.out, (slot, reason)))
        spare = self.spare[1:]
        active = tuple(self.spare[0] if s == slot else s for s in self.active) if self.spare else tuple(s for s in self.active if s != slot)
        size = len(active) - len(active) % self.multiple_of
        if size < max(self.min_nproc, 1):
            return None
        # what does not fill a whole multiple waits in reserve
        return replace(self, active=active[:size], spare=spare + active[size:], out=(*self.out, (slot, reason)))

    def short_of(self, slot: int, reason: str) -> Slots:
        """These slots with `slot` left out, even where too few remain to go on."""
        active = tuple(s for s in self.active if s != slot)
        return self.without(slot, reason) or replace(self, active=active, out=(*self.out, (slot, reason)))

    @property
    def suffice(self) -> bool:
        """Whether those in use can be a job."""
        return len(self.active) >= max(self.min_nproc, 1) and not len(self.active) % self.multiple_of

    def with_back(self, back: Collection[int], size: int) -> Slots:
        """These slots with those of `back` let in again, at most `size` of all in use; what does not fill a multiple waits in reserve."""
        pool = (*self.active, *self.spare, *back)
        n = min(size, len(pool))
        n -= n % self.multiple_of
        out = tuple((s, why) for s, why in self.out if s not in back)
        if n <= len(self.active):  # the order of those in use is that of the ranks that run
            return replace(self, spare=(*self.spare, *back), out=out)
        return replace(self, active=tuple(sorted(pool[:n])), spare=pool[n:], out=out)


@dataclass(frozen=True, kw_only=True)
class Action:
    """One answer, the slots it leaves in use, and the reason in words."""

    do: Do
    slots: Slots
    reason: str


def decide(failures: Sequence[Failure], slots: Slots, budgets: Budgets, restarts: int) -> Action:
    """What to do about `failures[-1]`, the newest; the others are those before it, oldest first.

    Args:
        failures: every attempt's first failure so far.
        slots: the node's slots as they were in the failed attempt.
        budgets: what is borne.
        restarts: restarts already made.
    """
    newest = failures[-1]
    if budgets.max_restarts is not None and restarts >= budgets.max_restarts and newest.kind is not Kind.PEER:
        return Action(do=Do.GIVE_UP, slots=slots, reason=f"--max-restarts {budgets.max_restarts} is used up")
    if newest.kind is Kind.PEER:
        return Action(do=Do.RESTART, slots=slots, reason=newest.message or "another node left or joined")
    if newest.kind is Kind.TEARDOWN:
        return Action(do=Do.GIVE_UP, slots=slots, reason="nothing is left to train, only the tear-down failed")
    if newest.kind is Kind.STORAGE:
        return Action(do=Do.GIVE_UP, slots=slots, reason="a restart would go on from before that: upload it first")
    if newest.kind is Kind.NODE_SICK:
        return Action(do=Do.GIVE_UP, slots=slots, reason="this node is not to be used until that is mended: start elsewhere")
    if newest.kind is Kind.SLOT_LOST:
        return _leave_out(newest, slots, f"slot {newest.slot} is lost", budgets.waits)
    if len(failures) >= budgets.unnumbered and newest.unnumbered:
        return Action(do=Do.GIVE_UP, slots=slots, reason=f"{len(failures)} failures, and the script does not say whether it makes progress")
    if newest.kind is Kind.EXCEPTION:
        return _after_exception(failures, slots, budgets)
    if newest.kind in (Kind.NUMBERS, Kind.REPLICAS):
        return _replay(failures, slots, budgets)
    if newest.kind is Kind.LEFT:
        return Action(do=Do.GIVE_UP, slots=slots, reason=f"rank {newest.rank} ended with 0 while the others were still waiting for it")
    strikes = _strikes(failures, budgets)
    if newest.kind is not Kind.CONNECTION and strikes >= budgets.strikes:
        smaller = slots.without(newest.slot, f"{strikes} failures in a row")
        if smaller is not None:
            return _shrink(newest.slot, slots, smaller, f"slot {newest.slot} failed {strikes} times in a row")
    stuck = _without_progress(failures)
    if newest.kind is Kind.HANG and _trailing(stuck, lambda f: f.kind is Kind.HANG) >= budgets.detections:
        return Action(do=Do.GIVE_UP, slots=slots, reason=f"{budgets.detections} hangs in a row without a new step")
    if len(stuck) >= budgets.without_progress:
        return Action(do=Do.GIVE_UP, slots=slots, reason=f"{len(stuck)} failures in a row without a new step")
    if newest.kind is Kind.CONNECTION:
        return Action(do=Do.RESTART, slots=slots, reason="a peer elsewhere has failed, or the network")
    if newest.kind is Kind.DEVICE:
        return Action(do=Do.RESTART, slots=slots, reason="the script's fault or a passing one: the device stays")
    return Action(do=Do.RESTART, slots=slots, reason=_count(failures, strikes))


def grow(slots: Slots, back: Collection[int], size: int) -> Action:
    """Let the slots of `back` in again: GROW if more can be in use than before, else CONTINUE, with them in reserve.

    Args:
        slots: the node's slots as they are.
        back: slots that were left out and are well again.
        size: how many were in use at the start.
    """
    after = slots.with_back(back, size)
    names = ", ".join(map(str, sorted(back)))
    well = f"slot{'s' if len(back) > 1 else ''} {names} passed the test"
    if len(after.active) == len(slots.active):
        return Action(do=Do.CONTINUE, slots=after, reason=f"{well}: kept in reserve")
    return Action(do=Do.GROW, slots=after, reason=f"{well}: back to {len(after.active)} of {size}")


def _after_exception(failures: Sequence[Failure], slots: Slots, budgets: Budgets) -> Action:
    newest = failures[-1]
    starts = _trailing(failures, lambda f: f.kind is Kind.EXCEPTION and not f.started)
    if starts >= budgets.failed_starts:
        return Action(do=Do.GIVE_UP, slots=slots, reason=f"the script could not start, {starts} times in a row")
    same = _trailing(failures, lambda f: f.kind is Kind.EXCEPTION and f.started and f.step is not None and f.step == newest.step)
    if same >= budgets.same_step_crashes:
        why = f"it crashed after step {newest.step} again: the code or the data, not the machine"
        return Action(do=Do.GIVE_UP, slots=slots, reason=why)
    stuck = _without_progress(failures)
    blind = _trailing(stuck, lambda f: f.kind is Kind.EXCEPTION and f.message == newest.message)
    if newest.step is None and blind > budgets.same_step_crashes:
        return Action(do=Do.GIVE_UP, slots=slots, reason=f"the same exception {blind} times in a row")
    if len(stuck) >= budgets.without_progress:
        return Action(do=Do.GIVE_UP, slots=slots, reason=f"{len(stuck)} failures in a row without a new step")
    return Action(do=Do.RESTART, slots=slots, reason="first crash at this step" if newest.started else "first failed start")


def _replay(failures: Sequence[Failure], slots: Slots, budgets: Budgets) -> Action:
    """Once, with every rank on another device: what then is bad again at the same step is in the data or the code."""
    newest = failures[-1]
    moved = ", with the ranks on other devices" if len(slots.active) > 1 or newest.shared else ""
    if any(f.kind is newest.kind and f.step == newest.step for f in failures[:-1]):
        what = "the loss is not finite" if newest.kind is Kind.NUMBERS else "the models of the ranks are not equal"
        return Action(do=Do.GIVE_UP, slots=slots, reason=f"{what} at step {newest.step} again{moved}: the data or the code")
    strikes = _strikes(failures, budgets)
    blamed = newest.slot >= 0 and strikes >= budgets.strikes
    if blamed and (smaller := slots.without(newest.slot, f"bad numbers {strikes} times in a row")) is not None:
        return _shrink(newest.slot, slots, smaller, f"slot {newest.slot} had bad numbers {strikes} times in a row")
    turned = replace(slots, active=(*slots.active[1:], slots.active[0]))
    return Action(do=Do.RESTART, slots=turned, reason=f"replayed once from before that{moved}")


def _leave_out(newest: Failure, slots: Slots, reason: str, waits: bool) -> Action:
    smaller = slots.without(newest.slot, reason)
    if smaller is None:
        left = len(slots.active) - 1
        why = f"{reason}; the {left} left cannot go on (--min-nproc {slots.min_nproc}, --world-size-multiple-of {slots.multiple_of})"
        if waits:
            return Action(do=Do.WAIT, slots=slots.short_of(newest.slot, reason), reason=f"{why}: waiting for a device")
        return Action(do=Do.GIVE_UP, slots=slots, reason=why)
    return _shrink(newest.slot, slots, smaller, reason)


def _shrink(slot: int, before: Slots, after: Slots, why: str) -> Action:
    if len(after.active) == len(before.active):
        return Action(do=Do.RESTART_WITHOUT, slots=after, reason=f"{why}: spare slot {before.spare[0]} takes its place")
    return Action(do=Do.RESTART_WITHOUT, slots=after, reason=f"{why}: going on with {len(after.active)} of {len(before.active)}")


def _count(failures: Sequence[Failure], strikes: int) -> str:
    newest = failures[-1]
    same = _trailing(failures, lambda f: f.rank == newest.rank and f.step is not None and f.step == newest.step)
    if same > 1:
        return f"rank {newest.rank} failed after step {newest.step} for the {_ordinal(same)} time"
    return f"strike {strikes} for slot {newest.slot}"


def _ordinal(n: int) -> str:
    return {2: "second", 3: "third"}.get(n, f"{n}th")


def _strikes(failures: Sequence[Failure], budgets: Budgets) -> int:
    """How many of the newest failures in a row were by the newest one's slot, within the window."""
    newest = failures[-1]
    blames = (Kind.SIGNAL, Kind.HANG, Kind.NUMBERS, Kind.REPLICAS)
    return _trailing(failures, lambda f: f.slot == newest.slot and f.kind in blames and newest.t - f.t <= budgets.strike_window_s)


def _without_progress(failures: Sequence[Failure]) -> Sequence[Failure]:
    """The newest failures between which no attempt got further than the best before it."""
    best: int | None = None
    since = 0
    for i, f in enumerate(failures):
        if f.unnumbered:
            since = i
        elif f.step is not None and (best is None or f.step > best):
            best = f.step
            since = i
    return failures[since:]


def _trailing(failures: Sequence[Failure], test: Callable[[Failure], bool]) -> int:
    n = 0
    for f in reversed(failures):
        if not test(f):
            break
        n += 1
    return n
