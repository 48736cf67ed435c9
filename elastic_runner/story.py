"""What a job on several nodes has come to, told as one: which of its nodes' events make its history."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from . import events as ev
from .events import Event
from .merging import PeerStarted
from .policy import Kind

_OF_ALL = (ev.FirstStep, ev.Restored, ev.RankProgress, ev.RankExited, ev.RankHung, ev.StackDumped, ev.ChaosFired, ev.DataStarved)
"""What counts whichever node says it; of the rest a history needs one node's word."""
_IN_CONSEQUENCE = (Kind.CONNECTION.value, Kind.PEER.value)


def told_as_one(events: Iterable[Event]) -> list[Event]:
    """The story of a job, for `history.fold`, from events in the order of `merging.merged`; what one node did is told as it was."""
    return [e for life in lives_of(events) for e in (_one_life(life) if len({e.node for e in life}) > 1 else life)]


def lives_of(events: Iterable[Event]) -> list[list[Event]]:
    """Cut where the launcher whose record is read began anew."""
    lives: list[list[Event]] = []
    for e in events:
        if not lives or (isinstance(e, ev.RunStarted) and not isinstance(e, PeerStarted)):
            lives.append([])
        lives[-1].append(e)
    return lives


def _one_life(life: Sequence[Event]) -> list[Event]:
    """The node whose record is read, which speaks first, tells; the others add what happened to them."""
    teller = life[0].node
    begins = {e.attempt: e for e in reversed(life) if isinstance(e, ev.AttemptStarted)}
    begins |= {e.attempt: e for e in life if isinstance(e, ev.AttemptStarted) and e.node == teller}
    failed = {generation: _first(life, generation) for generation in {e.attempt for e in life}}
    earliest = min(life, key=lambda e: e.t)
    slots = next((e.slots for e in life if isinstance(e, ev.RunStarted | ev.AttemptStarted) and e.node == teller), ())
    story: list[Event] = []
    for i, e in enumerate(life):
        if i == 0:
            story.append(replace(e, t=earliest.t, wall=earliest.wall))
        elif isinstance(e, ev.AttemptStarted):
            if (begin := begins.pop(e.attempt, None)) is not None:
                slots = begin.slots if begin.node == teller else slots
                story.append(replace(begin, slots=slots))
        elif isinstance(e, ev.Failed):
            if e is failed[e.attempt]:
                story.append(replace(e, cause=f"{e.cause or e.kind} on {e.node}"))
        elif isinstance(e, ev.Decided):
            if (blamed := failed[e.attempt]) is None and e.node == teller:
                story.append(replace(e, reason=_agreed(life, e.attempt) or e.reason))
            elif blamed is not None and e.node == blamed.node:
                story.append(e)
        elif isinstance(e, ev.Notice) and e.node != teller:
            story.append(replace(e, text=f"{e.node}: {e.text}"))
        elif isinstance(e, _OF_ALL) or (e.node == teller and not isinstance(e, ev.RunStarted)):
            story.append(e)
    return story


def _agreed(life: Sequence[Event], generation: int) -> str:
    """Why all nodes began the round after this one: a node that lost its leader did not know that yet when it stopped its ranks."""
    after = [e for e in life if isinstance(e, ev.RoundFormed) and e.generation > generation]
    return min(after, key=lambda e: e.generation).reason if after else ""


def _first(life: Sequence[Event], generation: int) -> ev.Failed | None:
    """Of an attempt's failures the one that the others followed from: the earliest that is no lost connection, if there is one."""
    failures = [e for e in life if isinstance(e, ev.Failed) and e.attempt == generation]
    return min(failures, key=lambda f: (f.kind in _IN_CONSEQUENCE, f.fault_t or f.t), default=None)
