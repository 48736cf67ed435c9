"""PASS or FAIL, with every reason: what was compared, and what was found."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..events import AttemptStarted, ChaosFired, Event, RunEnded
from ..goodput.account import account
from ..journal import read_events
from .answers import unanswered
from .samples import difference, trained_on
from .takes import Take
from .weights import Comparison, compare

JSON_SCHEMA = 1
_ANOTHER_JOB = 0.5
"""Weights that far apart, relatively, are not those of the same training, whatever its random numbers."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at. `ok` is None where there was nothing to look at."""

    name: str
    ok: bool | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All checks of a rehearsal. It has passed if none failed and the quiet take could be compared with."""

    checks: tuple[Check, ...]
    fired: tuple[str, ...]
    quiet: str
    chaos: str

    @property
    def passed(self) -> bool:
        """Whether none of the checks failed."""
        return all(c.ok is not False for c in self.checks)


def judge(quiet: Take, hurt: Take, least_goodput: float = 0.0) -> Verdict:
    """Compare two takes. `least_goodput`: the share of the quiet take's goodput that the other must keep."""
    before, after = (list(read_events(take.run_dir)) for take in (quiet, hurt))
    checks = (
        _ended(hurt, after),
        _fired(after),
        _answered(after),
        _weights(compare(quiet.folder, hurt.folder), before, after),
        _samples(quiet, hurt),
        _goodput(before, after, least_goodput),
        Check(name="left behind", ok=not hurt.left, text="; ".join(hurt.left) or "no process, no shared memory, no temporary file"),
    )
    fired = tuple(e.entry for e in after if isinstance(e, ChaosFired))
    return Verdict(checks=checks, fired=fired, quiet=str(quiet.folder), chaos=str(hurt.folder))


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """The verdict in JSON's own types."""
    return {"schema": JSON_SCHEMA, "verdict": "PASS" if verdict.passed else "FAIL", **asdict(verdict)}


def as_text(verdict: Verdict) -> str:
    """The verdict for people."""
    marks = {True: "ok  ", False: "FAIL", None: "?   "}
    lines = [f"  {marks[c.ok]}  {c.name:14} {c.text}" for c in verdict.checks]
    head = "PASS" if verdict.passed else "FAIL"
    return "\n".join([f"{head}: {len(verdict.fired)} faults fired", *lines, f"the takes: {verdict.quiet}, {verdict.chaos}"]) + "\n"


def _ended(hurt: Take, events: Sequence[Event]) -> Check:
    end = next((e for e in reversed(events) if isinstance(e, RunEnded)), None)
    lives = "" if hurt.lives == 1 else f", with {hurt.lives} launchers"
    if hurt.status is None:
        return Check(name="ends well", ok=False, text=f"it did not end within {hurt.seconds:.0f} s")
    if hurt.status:
        how = signal.Signals(-hurt.status).name if hurt.status < 0 else f"status {hurt.status}"
        return Check(name="ends well", ok=False, text=f"it ended with {how}{lives}" + (f": {end.reason}" if end and end.reason else ""))
    return Check(name="ends well", ok=True, text=f"status 0 after {hurt.seconds:.1f} s{lives}")


def _fired(events: Sequence[Event]) -> Check:
    fired = [e for e in events if isinstance(e, ChaosFired)]
    end = next((e for e in reversed(events) if isinstance(e, RunEnded)), None)
    never = f"; never came to pass: {'; '.join(end.chaos_unfired)}" if end is not None and end.chaos_unfired else ""
    return Check(name="faults fired", ok=bool(fired), text=f"{len(fired)}{never}")


def _answered(events: Sequence[Event]) -> Check:
    wrong = unanswered(events)
    return Check(name="faults seen", ok=not wrong, text="; ".join(wrong) or "each is on record as what it was, with what was decided")


def _weights(found: Sequence[Comparison], before: Sequence[Event], after: Sequence[Event]) -> Check:
    name = "same weights"
    if not found:
        return Check(name=name, ok=None, text="not known: the script writes no checkpoints of goodrun's")
    if faults := [c for c in found if c.fault]:
        return Check(name=name, ok=False, text="; ".join(f"{c.directory}: {c.fault}" for c in faults))
    worst = max(found, key=lambda c: c.apart)
    at = f"at step {worst.step}"
    if not worst.apart:
        return Check(name=name, ok=True, text=f"every tensor of the newest checkpoint, {at}, is equal to the last bit")
    sizes = {e.world_size for e in (*before, *after) if isinstance(e, AttemptStarted)}
    apart = f"{at} they are {worst.apart:.1e} apart, relatively; most in {worst.worst}"
    if len(sizes) == 1:
        return Check(name=name, ok=False, text=f"{apart} (docs/exactness.md has what it takes to be exact)")
    # other sums, and other random numbers (dropout): how far apart the same training may then be nobody can say
    return Check(name=name, ok=None if worst.apart < _ANOTHER_JOB else False, text=f"{apart} (the world size was not always the same)")


def _samples(quiet: Take, hurt: Take) -> Check:
    before, after = trained_on(quiet.folder), trained_on(hurt.folder)
    if not before:
        return Check(name="same samples", ok=None, text="not known: the script has no ElasticSampler")
    wrong = difference(before, after)
    batches = f"{len(after)} batches, {sum(n.total() for n in after.values())} samples: none lost, none repeated"
    return Check(name="same samples", ok=not wrong, text=wrong or batches)


def _goodput(before: Sequence[Event], after: Sequence[Event], least: float) -> Check:
    quiet, hurt = account(before), account(after)
    share = hurt.ettr / quiet.ettr if quiet.ettr else 0.0
    text = f"{100 * hurt.ettr:.0f} % of the time, {100 * quiet.ettr:.0f} % in the quiet take"
    if share < least:
        return Check(name="goodput", ok=False, text=f"{text}: {share:.2f} of it, less than the {least:g} asked for")
    return Check(name="goodput", ok=True, text=text)
