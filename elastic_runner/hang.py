"""Finds the rank that hangs: pure judgement over pages, signs of work and stacks; the caller looks, dumps and kills.

Two kinds of evidence are asked for. A rank is *silent* when its last beat is older than a limit learned from this run's own steps, and
*still* when its process shows no sign of work: hardly any CPU time in it or its children, no bytes moved, its main thread not once
scheduled. A rank that evaluates, compiles, reads or writes works, however long it takes. A stopped process (state T) is evidence by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..progress import Phase, Progress
from .processes import Signs

_STEPS_TO_LEARN = 3
_CALM_S = 0.3
_CALM_SHARE = 0.7
_IDLE_CPU = 0.025
_IDLE_TICKS_S = 0.011
"""What an idle process may use, a share of a core and a tick of the clock: gloo's threads look around a hundred times a second."""
_COLLECTIVE = re.compile(r"/torch/(distributed/|autograd/graph\.py)")
_OF_DDP = re.compile(r"/torch/nn/parallel/distributed\.py")
"""DDP's own calls to C++, as when it brings buffers into step; of a forward pass it is never the innermost frame."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long silence is borne, in seconds. The factors are ours; the lengths they multiply are the run's."""

    factor: float = 2.5
    """Times the longest step of this attempt…"""
    floor_s: float = 0.5
    """…plus this: with the look and the stack dump it stays under 3 × the longest step + 1 s."""
    data_factor: float = 20.0
    data_floor_s: float = 30.0
    """For a rank that is inside a DataLoader fetch: storage has bad minutes that say nothing about the rank."""
    announced_s: float = 1800.0
    """For a phase the script announced (save, restore, eval, idle)."""
    start_s: float = 300.0
    """Before the first step, once some other rank is past it."""
    busy_s: float = 900.0
    """For a rank that works but never beats while all others are blocked behind it."""
    left_s: float = 300.0
    """For ranks that are all still after a peer has ended with 0."""
    teardown_s: float = 60.0
    """The same, if they had made as many steps as that peer: what is left is the tear-down."""

    def of(self, p: Progress, longest_step_s: float, known_start_s: float) -> float:
        """The limit for a rank whose page reads `p`."""
        if p.phase in (Phase.SAVE, Phase.RESTORE, Phase.EVAL, Phase.IDLE):
            return self.announced_s
        if p.steps_done < _STEPS_TO_LEARN or not longest_step_s:
            return 3 * known_start_s + 10 if known_start_s else self.start_s
        if p.phase is Phase.DATA:
            return self.data_factor * longest_step_s + self.data_floor_s
        return self.factor * longest_step_s + self.floor_s


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """Why the ranks should be looked at closely: `ranks` are those under suspicion, `evidence` what spoke against them."""

    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    silent_s: float


@dataclass(kw_only=True)
class _Seen:
    signs: Signs
    calm_since: float
    calm_cpu_s: float
    """CPU seconds when the calm began."""
    stopped_looks: int = 0


@dataclass(kw_only=True)
class HangDetector:
    """Judges one attempt; made anew for each, so nothing of an old attempt speaks against a new one."""

    limits: Limits = field(default_factory=Limits)
    known_start_s: float = 0.0
    """How long the slowest start of this run took so far; 0 while none is known, and a start cannot be judged."""
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _looked_t: float = 0.0
    _quiet_until: float = 0.0

    def look(self, now: float, ranks: Mapping[int, tuple[Progress, Signs]], *, finishing: bool = False) -> Suspicion | None:
        """Judge all living ranks of the node at once; keys are global ranks, times monotonic seconds.

        `finishing`: some rank has ended with 0 already. What the others do after their last step takes as long as it takes.
        """
        if now - self._looked_t > 1.0:  # we were not running (suspended, or the machine was): old looks prove nothing
            self._seen.clear()
        self._looked_t = now
        for rank, (_, signs) in ranks.items():
            self._note(now, rank, signs)
        stopped = tuple(r for r, s in self._seen.items() if r in ranks and s.stopped_looks >= 2)
        if stopped:
            return Suspicion(ranks=stopped, evidence=("stopped (state T)",), silent_s=max(now - ranks[r][0].t for r in stopped))
        return None if finishing else self._silent(now, ranks)

    def cleared(self, now: float, silent_s: float) -> None:
        """A suspicion came to nothing: raise no other until the silence has lasted half as long again."""
        self._quiet_until = now + max(silent_s / 2, 0.5)

    def calm_for(self, ranks: tuple[int, ...]) -> float:
        """For how many seconds up to the last look none of `ranks` has shown a sign of work."""
        return min((self._looked_t - self._seen[r].calm_since for r in ranks if r in self._seen), default=0.0)

    def _note(self, now: float, rank: int, signs: Signs) -> None:
        seen = self._seen.get(rank)
        if seen is None:
            self._seen[rank] = _Seen(signs=signs, calm_since=now, calm_cpu_s=signs.cpu_s, stopped_looks=int(signs.state == "T"))
            return
        old, seen.signs = seen.signs, signs
        seen.stopped_looks = seen.stopped_looks + 1 if signs.state == "T" else 0
        idle_cpu_s = _IDLE_TICKS_S + _IDLE_CPU * (now - seen.calm_since)
        computes = signs.cpu_s - seen.calm_cpu_s > idle_cpu_s
        if signs.state in "RD" or computes or signs.io_bytes != old.io_bytes or signs.switches > old.switches:
            seen.calm_since, seen.calm_cpu_s = now, signs.cpu_s

    def _silent(self, now: float, ranks: Mapping[int, tuple[Progress, Signs]]) -> Suspicion | None:
        longest = max((p.longest_step_s for p, _ in ranks.values()), default=0.0)
        if not ranks or not (self.known_start_s or any(p.steps_done for p, _ in ranks.values())):
            return None
        silent = {r: now - p.t for r, (p, _) in ranks.items()}
        # one rank within its limit clears them all: the others may be waiting for it, and it is at work
        if any(silent[r] < self.limits.of(p, longest, self.known_start_s) for r, (p, _) in ranks.items()):
            return None
        if min(silent.values()) > self.limits.busy_s:
            return Suspicion(ranks=tuple(ranks), evidence=(f"no beat for {max(silent.values()):.0f} s",), silent_s=max(silent.values()))
        if now < self._quiet_until:
            return None
        # still all along, not just between two looks at a clock or a file
        calm = tuple(r for r in ranks if now - self._seen[r].calm_since >= max(_CALM_S, _CALM_SHARE * silent[r]))
        worst = max(silent.values())
        if calm:
            words = (f"no beat for {worst:.1f} s, longest step {longest:.2f} s", "no sign of work")
            return Suspicion(ranks=calm, evidence=words, silent_s=worst)
        return None


def in_collective(stack: tuple[str, ...]) -> bool:
    """Whether a Python stack (innermost first) stands in a collective, or in the backward pass where DDP's collectives are awaited."""
    if not stack or "/torch/" not in stack[0]:
        return False
    return bool(_OF_DDP.search(stack[0])) or any(_COLLECTIVE.search(frame) for frame in stack[:8])


def culprit(
    suspects: tuple[int, ...], progress: Mapping[int, Progress], stacks: Mapping[int, tuple[str, ...]], whole_job: bool
) -> tuple[int, str] | None:
    """Which of the suspects hung first, and on what grounds; None if they only wait for a rank that is at work.

    The one that is not in a collective keeps the others waiting; among several, the one furthest behind, then the one silent longest.
    `whole_job` says that there are no ranks on other nodes for which all of these could be waiting.
    """

    def behind(rank: int) -> tuple[int, float, int]:
        return progress[rank].step, progress[rank].t, rank

    apart = [r for r in suspects if stacks.get(r) and not in_collective(stacks[r])]
    at_work = [r for r in progress if r not in suspects and stacks.get(r) and not in_collective(stacks[r])]
    if apart and not at_work:
        alone = len(progress) == len(apart)
        return min(apart, key=behind), "it waits outside any collective" if alone else "its peers wait for it in a collective"
    if at_work or len(suspects) < len(progress) or not whole_job:
        return None
    mute = [r for r in suspects if not stacks.get(r)]
    if mute and len(mute) < len(suspects):
        return min(mute, key=behind), "its peers wait in a collective, and it gives no stack"
    return min(suspects, key=behind), "all ranks wait in collectives; it is furthest behind"
