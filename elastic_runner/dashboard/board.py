"""What `goodrun top` shows, as a fold over events: the state of the run, its ranks, its restarts, its pace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .. import events as ev
from ..events import Event
from ..goodput.account import Goodput, balance
from ..goodput.ledger import Ledger
from ..history import History, fold

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank as its page last told. `data_share` is of the time since the attempt's first step; -1 where unknown."""

    rank: int
    slot: int
    step: int
    step_s: float
    data_share: float
    data_wait_s: float
    silent_s: float
    phase: str
    health: str


class Board:
    """The state of one run; `add` is the only way in."""

    def __init__(self) -> None:
        self.run = ev.RunStarted()
        self.state = "starting"
        self.cause = ""
        """What the newest failure was, until every rank steps again."""
        self.world_size = 0
        self.slots: tuple[int, ...] = ()
        self.first_t = self.newest_t = 0.0
        self.newest_wall = ""
        self.failed: ev.Failed | None = None
        self.ledgers: dict[str, Ledger] = {}
        self.losses: list[tuple[float, float]] = []
        """Seconds since the first event and the loss then, where the script gives one; this node's first."""
        self.first_rank = 0
        self.upload: ev.Saving | None = None
        """The snapshot that is on its way to storage, where that takes a while."""
        self.unsaved: ev.SaveEnded | None = None
        """The newest snapshot, if it did not become durable."""
        self._durable = -1
        self._stepping_t = 0.0
        self._progress: ev.RankProgress | None = None
        self._hung: set[int] = set()
        self._exited: set[int] = set()
        self._told: list[Event] = []
        self._history: History | None = None
        self._last: tuple[int, int] | None = None
        self._stretches: list[tuple[int, int, int]] = []
        self._faults: list[int] = []

    def add(self, e: Event) -> None:
        """Take one event."""
        self.ledgers.setdefault(e.node, Ledger()).add(e)
        self._paced(e)
        self.first_t = self.first_t or e.t
        self.newest_t, self.newest_wall = e.t, e.wall or self.newest_wall
        if isinstance(e, ev.RankProgress):
            if self._told and isinstance(self._told[-1], ev.RankProgress):
                self._told.pop()  # the story needs only the last before something happens
            self._progress = e
        else:
            self._history = None
        self._told.append(e)
        match e:
            case ev.RunStarted():
                self.run, self.state = e, "starting"
            case ev.AttemptStarted():
                self.world_size, self.slots, self.first_rank = e.world_size, e.slots, e.first_rank
                self._progress, self._hung, self._exited, self._stepping_t = None, set(), set(), 0.0
            case ev.FirstStep():
                self.state, self.cause, self._stepping_t = "training", "", e.first_step_t or e.t
            case ev.Failed():
                self.state, self.cause, self.failed = "recovering", e.cause, e
            case ev.RankHung():
                self._hung.add(e.rank)
            case ev.RankExited():
                self._exited.add(e.rank)
            case ev.Saving():
                self.upload = e
            case ev.SaveEnded():
                self._saved(e)
            case ev.Stopping() if e.why == "signal":
                self.state = "stopping"
            case ev.RunEnded():
                self.state = e.outcome or "ended"
            case _:
                pass

    def extend(self, events: Iterable[Event]) -> Board:
        """Take many; returns itself."""
        for e in events:
            self.add(e)
        return self

    @property
    def goodput(self) -> Goodput:
        """As it stands."""
        return balance(self.ledgers)

    @property
    def history(self) -> History:
        """The attempts so far."""
        if self._history is None:
            self._history = fold(self._told)
        return self._history

    @property
    def step(self) -> int:
        """The furthest step of the present attempt, else of the run."""
        return max(self._progress.steps, default=-1) if self._progress and self._progress.steps else self.history.best_step

    @property
    def checkpoints(self) -> tuple[int, int]:
        """The newest snapshot of this attempt, and the newest one of the run that is durable; -1 where there is none yet."""
        saved, durable = (self._progress.saved_step, self._progress.durable_step) if self._progress else (-1, -1)
        return saved, max(durable, self._durable)

    @property
    def trouble(self) -> str:
        """Why the newest snapshot is not in storage, though it was tried; empty if nothing is wrong."""
        if self.upload is not None and self.upload.trouble:
            return self.upload.trouble
        return self.unsaved.why if self.unsaved is not None and self.unsaved.fate in ("failed", "kept") else ""

    def ranks(self) -> list[RankRow]:
        """This node's ranks."""
        p = self._progress or ev.RankProgress()
        since = p.t - self._stepping_t if self._stepping_t else 0.0
        rows = []
        for local, slot in enumerate(self.slots):
            rank = self.first_rank + local
            silent, longest = _of(p.silent_s, local, 0.0), p.longest_step_s
            health = "gone" if rank in self._exited else "hung" if rank in self._hung else ""
            if not health:
                health = "starting" if not self._stepping_t else "slow" if longest and silent > 3 * longest + 1 else "ok"
            rows.append(
                RankRow(
                    rank=rank,
                    slot=slot,
                    step=_of(p.steps, local, -1),
                    step_s=_of(p.last_step_s, local, 0.0),
                    data_wait_s=_of(p.data_wait_s, local, 0.0),
                    data_share=min(_of(p.data_wait_s, local, 0.0) / since, 1.0) if since > 0 else -1.0,
                    silent_s=silent,
                    phase=_of(p.phases, local, ""),
                    health=health,
                )
            )
        return rows

    def pace(self, columns: int) -> tuple[list[float], list[bool]]:
        """Steps a second in each of `columns` equal parts of the run so far, and whether a fault fell into it; this node's first."""
        if not self.ledgers or columns < 1:
            return [], []
        whole = max(next(iter(self.ledgers.values())).newest_us, 1)
        steps, faults = [0.0] * columns, [False] * columns
        for at in self._faults:
            faults[min(at * columns // whole, columns - 1)] = True
        for begin, end, done in self._stretches:
            for c in range(begin * columns // whole, min(end * columns // whole, columns - 1) + 1):
                overlap = min(end, (c + 1) * whole / columns) - max(begin, c * whole / columns)
                steps[c] += done * max(overlap, 0) / (end - begin)
        width_s = whole / columns / 1e6
        return [n / width_s for n in steps], faults

    def _saved(self, e: ev.SaveEnded) -> None:
        if self.upload is not None and e.fate != "skipped" and e.step >= self.upload.step:
            self.upload = None
        self.unsaved = None if e.fate == "durable" else e
        if e.fate == "durable":
            self._durable = max(self._durable, e.step)

    def _paced(self, e: Event) -> None:
        """Keep how many steps were made between two reports."""
        now = next(iter(self.ledgers.values())).newest_us
        if isinstance(e, ev.RankProgress) and e.loss is not None:
            self.losses.append((now / 1e6, e.loss))
        if isinstance(e, ev.FirstStep):
            self._last = (now, e.step)
        elif isinstance(e, ev.Failed | ev.Decided | ev.AttemptStarted):
            if isinstance(e, ev.Failed):
                self._faults.append(now)
            self._last = None
        elif isinstance(e, ev.RankProgress) and self._last is not None:
            begin, before = self._last
            step = max(e.steps, default=-1)
            if step > before and now > begin:
                self._stretches.append((begin, now, step - before))
                self._last = (now, step)


def _of(values: Sequence[T], i: int, otherwise: T) -> T:
    return values[i] if i < len(values) else otherwise
