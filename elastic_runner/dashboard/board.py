"""What `goodrun top` shows, as a fold over events: the state of the run, its ranks, its restarts, its pace."""

from __future__ import annotations

from collections.abc import Iterable

from .. import events as ev
from ..events import Event
from ..goodput.account import Goodput, balance
from ..goodput.ledger import Ledger
from ..history import History, fold
from ..merging import PeerStarted
from ..story import told_as_one
from .ranks import NodeRanks, RankRow
from .saved import Saved


class Board:
    """The state of one run; `add` is the only way in."""

    def __init__(self) -> None:
        self.run = ev.RunStarted()
        self.state = "starting"
        self.cause = ""
        """What the newest failure was, until every rank steps again."""
        self.world_size = 0
        self.first_t = self.newest_t = 0.0
        self.newest_wall = ""
        self.failed: ev.Failed | None = None
        self.ledgers: dict[str, Ledger] = {}
        self.losses: list[tuple[float, float]] = []
        """Seconds since the first event and the loss then, where the script gives one; this node's first."""
        self.saved = Saved()
        self._home = NodeRanks(node="")
        """The node whose record is read: it speaks first, and for the run as a whole."""
        self._nodes: dict[str, NodeRanks] = {}
        self._told: list[Event] = []
        self._history: History | None = None
        self._last: tuple[int, int] | None = None
        self._stretches: list[tuple[int, int, int]] = []
        self._faults: list[int] = []

    def add(self, e: Event) -> None:
        """Take one event."""
        self.ledgers.setdefault(e.node, Ledger()).add(e)
        node = self._nodes.setdefault(e.node, NodeRanks(node=e.node))
        node.add(e)
        self.saved.add(e)
        if len(self._nodes) == 1 or (isinstance(e, ev.RunStarted) and not isinstance(e, PeerStarted)):
            self._home = node
        self._keep(e)
        if isinstance(e, ev.Failed) and e.attempt >= self._home.attempt:
            self.state, self.cause, self.failed = "recovering", e.cause, e
            self._faults.append(self.ledgers[self._home.node].newest_us)
        if e.node == self._home.node:
            self._hear_home(e)

    def _hear_home(self, e: Event) -> None:
        self._paced(e)
        self.first_t = self.first_t or e.t
        self.newest_t, self.newest_wall = e.t, e.wall or self.newest_wall
        match e:
            case ev.RunStarted():
                self.run, self.state = e, "starting"
            case ev.AttemptStarted():
                self.world_size = e.world_size
            case ev.FirstStep():
                self.state, self.cause = "training", ""
            case ev.Stopping() if e.why == "signal":
                self.state = "stopping"
            case ev.RunEnded():
                self.state = e.outcome or "ended"
            case _:
                pass

    def _keep(self, e: Event) -> None:
        """Of each node's progress the story needs only the last before something happens."""
        i = len(self._told)
        while isinstance(e, ev.RankProgress) and i and isinstance(self._told[i - 1], ev.RankProgress):
            i -= 1
            if self._told[i].node == e.node:
                del self._told[i]
        if not isinstance(e, ev.RankProgress):
            self._history = None
        self._told.append(e)

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
            self._history = fold(told_as_one(self._told))
        return self._history

    @property
    def slots(self) -> tuple[int, ...]:
        """This node's, in the present attempt."""
        return self._home.slots

    @property
    def first_rank(self) -> int:
        """The global number of this node's first rank."""
        return self._home.first_rank

    @property
    def _present(self) -> list[NodeRanks]:
        """The nodes that are in the newest attempt."""
        newest = max((n.attempt for n in self._nodes.values()), default=-1)
        return [n for n in self._nodes.values() if n.attempt == newest]

    @property
    def step(self) -> int:
        """The furthest step of the present attempt, else of the run."""
        steps = [max(n.progress.steps) for n in self._present if n.progress is not None and n.progress.steps]
        return max(steps) if steps else self.history.best_step

    @property
    def checkpoints(self) -> tuple[int, int]:
        """The newest snapshot of this attempt, and the newest one of the run that is durable; -1 where there is none yet."""
        told = [n.progress for n in self._present if n.progress is not None]
        durable = max((p.durable_step for p in told), default=-1)
        return max((p.saved_step for p in told), default=-1), max(durable, self.saved.durable)

    def ranks(self) -> list[RankRow]:
        """The ranks of all nodes."""
        return sorted((row for n in self._present for row in n.rows()), key=lambda row: row.rank)

    def pace(self, columns: int) -> tuple[list[float], list[bool]]:
        """Steps a second in each of `columns` equal parts of the run so far, and whether a fault fell into it; this node's first."""
        if not self.ledgers or columns < 1:
            return [], []
        whole = max(self.ledgers[self._home.node].newest_us, 1)
        steps, faults = [0.0] * columns, [False] * columns
        for at in self._faults:
            faults[min(at * columns // whole, columns - 1)] = True
        for begin, end, done in self._stretches:
            for c in range(begin * columns // whole, min(end * columns // whole, columns - 1) + 1):
                overlap = min(end, (c + 1) * whole / columns) - max(begin, c * whole / columns)
                steps[c] += done * max(overlap, 0) / (end - begin)
        width_s = whole / columns / 1e6
        return [n / width_s for n in steps], faults

    def _paced(self, e: Event) -> None:
        """Keep how many steps were made between two reports."""
        now = self.ledgers[self._home.node].newest_us
        if isinstance(e, ev.RankProgress) and e.loss is not None:
            self.losses.append((now / 1e6, e.loss))
        if isinstance(e, ev.FirstStep):
            self._last = (now, e.step)
        elif isinstance(e, ev.Failed | ev.Decided | ev.AttemptStarted):
            self._last = None
        elif isinstance(e, ev.RankProgress) and self._last is not None:
            begin, before = self._last
            step = max(e.steps, default=-1)
            if step > before and now > begin:
                self._stretches.append((begin, now, step - before))
                self._last = (now, step)
