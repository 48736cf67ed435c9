"""Whether every fault that fired is on record as what it was, with an answer: a fold over the events of the take with chaos."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...fault_injection import ENDS_THE_LAUNCHER, KINDS
from ..events import AttemptStarted, ChaosFired, Decided, DeviceVerdict, Event, Failed, Notice, RunStarted

_SAYS_WITHIN_S = 2.0
"""A fault that came later than this before the end of its launcher may have gone unsaid."""
_SAYS = {"keeper-kill": "the keeper of the checkpoints has died", "prober-kill": "the prober was killed"}
_ANY_RANK = ("deadlock", "peers-cut", "slot-lost", "param-flip")
"""Here the rank that is named need not be the one that was hurt."""


@dataclass
class _Stretch:
    """The events of one attempt of one launcher."""

    events: list[Event] = field(default_factory=list)


def kind_of(fired: ChaosFired) -> str:
    """The kind of an entry that fired."""
    return fired.entry.partition("@")[0].partition(":")[0].strip()


def unanswered(events: Iterable[Event]) -> list[str]:
    """The faults that nobody noticed, or took for something else, each in a sentence."""
    found: list[str] = []
    for stretch in _stretches(events):
        fired = [e for e in stretch.events if isinstance(e, ChaosFired)]
        for one in fired:
            if (wrong := _wrong(one, fired, stretch.events)) is not None:
                found.append(f"{one.entry}: {wrong}")
    return found


def _stretches(events: Iterable[Event]) -> list[_Stretch]:
    found = [_Stretch()]
    for e in events:
        if isinstance(e, RunStarted | AttemptStarted):
            found.append(_Stretch())
        found[-1].events.append(e)
    return found


def _wrong(one: ChaosFired, fired: Sequence[ChaosFired], events: Sequence[Event]) -> str | None:
    kind = kind_of(one)
    if any(kind_of(other) in ENDS_THE_LAUNCHER for other in fired):
        return None  # whoever should have noticed may have been gone
    if (words := _SAYS.get(kind)) is not None:
        said = any(isinstance(e, Notice) and words in e.text for e in events)
        return None if said or events[-1].t - one.t < _SAYS_WITHIN_S else "nothing is said of it"
    if KINDS[kind].on_device and kind != "memory-held":
        seen = any(isinstance(e, DeviceVerdict) and e.slot == one.slot for e in events)
        if not seen and "for=" not in one.entry:  # a short one may be over before the driver is asked
            return "no verdict on the GPU is on record"
    shows = KINDS[kind].shows
    if not shows or (KINDS[kind].on_device and "for=" in one.entry):
        return None
    failed = next((e for e in events if isinstance(e, Failed)), None)
    if failed is None:
        return "no failure is on record"
    if not any(isinstance(e, Decided) for e in events):
        return "nothing was decided"
    if sum(bool(KINDS[kind_of(other)].shows) for other in fired) > 1:
        return None  # only the first of several failures is on record
    if failed.kind not in shows:
        return f"on record as {failed.kind} ({failed.cause}), not as {' or '.join(shows)}"
    if kind not in _ANY_RANK and not KINDS[kind].on_device and failed.rank != one.rank:
        return f"rank {failed.rank} is blamed ({failed.cause}), rank {one.rank} was hurt"
    return None
