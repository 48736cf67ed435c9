"""One record of a job on several nodes: what all of them wrote, by generation and by the time of the reader's clock."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from . import events as ev
from .events import Event
from .journal import OTHERS_NAME, event_of, read_thinned

_TIMES = {cls: tuple(f.name for f in fields(cls) if f.name == "t" or f.name.endswith("_t")) for cls in ev.KINDS.values()}


@dataclass(frozen=True, kw_only=True)
class PeerStarted(ev.RunStarted):
    """The launcher of another node took its part in the job; only in what is merged."""


@dataclass(frozen=True)
class Place:
    """What is to be added to an agent's times, and what its node is called."""

    by: float
    node: str
    own: bool

    def fit(self, e: Event) -> Event:
        """The event as it is told among the others'."""
        times = {name: round(at + self.by, 6) for name in _TIMES[type(e)] if (at := getattr(e, name)) > 0} if self.by else {}
        if isinstance(e, ev.RunStarted) and not self.own:
            e = PeerStarted(**vars(e))
        return replace(e, node=self.node, **times) if times or self.node != e.node else e


@dataclass(kw_only=True)
class Part:
    """What one agent (a launcher's one life) wrote, oldest first. `own`: it is of the record that is being read."""

    agent: str
    events: list[Event]
    own: bool = False

    @property
    def rounds(self) -> list[ev.RoundFormed]:
        """Those that it was in."""
        return [e for e in self.events if isinstance(e, ev.RoundFormed)]

    @property
    def began(self) -> float:
        """Its first moment, by its own wall clock."""
        return _moment(self.events[0])


def read_job(run_dir: Path, progress_lines: int = 30_000) -> list[Event]:
    """What a run's own record and the other nodes of the job tell, as `merged` has it. Raises OSError if the record cannot be read."""
    own = read_thinned(run_dir, progress_lines)
    if not (run_dir / OTHERS_NAME).exists():
        return list(own)
    return merged([*own_parts(own), *others(read_told(run_dir))])


def read_told(run_dir: Path) -> Iterator[tuple[str, int, Event]]:
    """What other nodes have told: whose it is, its number, the event."""
    with open(run_dir / OTHERS_NAME, "rb") as f:
        for line in f:
            if (told := parse_told(line)) is not None:
                yield told


def parse_told(line: bytes) -> tuple[str, int, Event] | None:
    """One line of what other nodes have told; None if it is torn or of a kind that this version does not know."""
    try:
        body: Any = json.loads(line)
        agent, n = str(body.pop("agent")), int(body.pop("n"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    event = event_of(body)
    return None if event is None else (agent, n, event)


def own_parts(events: Iterable[Event]) -> list[Part]:
    """A record cut into its launchers' lives; who each was, its rounds tell."""
    parts: list[Part] = []
    for e in events:
        if not parts or isinstance(e, ev.RunStarted):
            parts.append(Part(agent="", events=[], own=True))
        parts[-1].events.append(e)
        if isinstance(e, ev.RoundFormed) and 0 <= e.node_rank < len(e.nodes):
            parts[-1].agent = e.nodes[e.node_rank]
    for i, part in enumerate(parts):
        part.agent = part.agent or f"life {i}"
    return parts


def others(told: Iterable[tuple[str, int, Event]]) -> list[Part]:
    """What was told, agent by agent, each line once: who comes back is told what it knew before, too."""
    parts: dict[str, Part] = {}
    newest: dict[str, int] = {}
    for agent, n, event in told:
        if n > newest.get(agent, -1):
            newest[agent] = n
            parts.setdefault(agent, Part(agent=agent, events=[])).events.append(event)
    return list(parts.values())


def merged(parts: Iterable[Part]) -> list[Event]:
    """All events in one order, times moved to one clock, nodes told apart by name.

    Life by life of the job, by generation, then by time; each agent's own order is kept. What an agent wrote itself goes before what
    others were told of it. The first event of a life is of the record that is read, where it had a part in it.
    """
    by_agent: dict[str, Part] = {}
    for part in sorted(parts, key=lambda p: not p.own):
        by_agent.setdefault(part.agent, part)
    lives = _lives(list(by_agent.values()))
    places = _placed(lives)
    return [e for life in lives for e in _one_order(life, places)]


def placed(parts: Iterable[Part]) -> dict[str, Place]:
    """For each agent what makes its events fit among the others'."""
    return _placed(_lives(list(parts)))


def _placed(lives: list[list[Part]]) -> dict[str, Place]:
    names = _named(lives)
    return {p.agent: Place(_behind(p, _reference(life)), names[p.agent], p.own) for life in lives for p in life}


def _reference(life: list[Part]) -> Part:
    return next((p for p in life if p.own), life[0])


def _one_order(life: list[Part], places: Mapping[str, Place]) -> list[Event]:
    reference = _reference(life)
    streams = [_keyed([places[p.agent].fit(e) for e in p.events], p, first=p is reference) for p in life]
    return [e for _, _, e in heapq.merge(*streams, key=lambda keyed: keyed[:2])]


def _keyed(events: Sequence[Event], part: Part, *, first: bool) -> Iterator[tuple[int, float, Event]]:
    before = next((r.generation - 1 for r in part.rounds), -1)  # it came while that generation trained
    for i, e in enumerate(events):
        yield (-2, 0.0, e) if first and i == 0 else (max(e.attempt, before), e.t, e)


def _lives(parts: list[Part]) -> list[list[Part]]:
    """Agents that were in rounds with each other, however far around, worked on one life of the job; oldest life first.

    Who was in no round belongs to the newest, but for a record's own earlier lives, which ended before they met anybody.
    """
    groups: list[tuple[set[str], list[Part]]] = []
    alone: list[Part] = []
    for part in sorted(parts, key=lambda p: p.began):
        agents = {part.agent}.union(*(r.nodes for r in part.rounds))
        if len(agents) == 1 and not part.own:
            alone.append(part)
            continue
        with_these = [g for g in groups if g[0] & agents]
        groups = [g for g in groups if not g[0] & agents]
        groups.append((agents.union(*(g[0] for g in with_these)), [p for g in with_these for p in g[1]] + [part]))
    lives = sorted((sorted(g[1], key=lambda p: p.began) for g in groups), key=lambda life: life[0].began)
    if lives:
        lives[-1] += alone
    return lives or ([alone] if alone else [])


def _named(lives: list[list[Part]]) -> dict[str, str]:
    """A node's name for each agent: its host's; with a number where that host runs several at a time."""
    names: dict[str, str] = {}
    until: dict[str, float] = {}
    for life in lives:
        for part in life:
            host, k = part.events[0].node, 1
            while until.get(name := host if k == 1 else f"{host}#{k}", float("-inf")) > part.began:
                k += 1
            names[part.agent] = name
            until[name] = max(_moment(part.events[-1]), part.began)
    return names


def _behind(part: Part, reference: Part) -> float:
    """What is to be added to a part's monotonic times to have them on the clock of `reference`.

    Each round tells how far a node's wall clock is behind that of its leader, and in a round of both that is the same one.
    """
    if part is reference:
        return 0.0
    ours, theirs = _leader_less_own(part), _leader_less_own(reference)
    if both := [ours[g] - theirs[g] for g in ours.keys() & theirs.keys()]:
        return median(both)
    return median(ours.values()) - median(theirs.values())


def _leader_less_own(part: Part) -> dict[int, float]:
    """By generation: the leader's wall clock less this agent's monotonic one."""
    known = {r.generation: _moment(r) + r.clock_behind_s - r.t for r in part.rounds}
    return known or {-1: part.began - part.events[0].t}


def _moment(e: Event) -> float:
    try:
        return datetime.fromisoformat(e.wall).timestamp()
    except ValueError:
        return e.t
