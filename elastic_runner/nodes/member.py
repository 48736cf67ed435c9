"""One agent as a member of the job: whom it follows, what it has agreed to, when it must stop its ranks. Pure: no clock, no socket."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .messages import Ack, Change, Closed, Commit, Hello, Leave, Message, Ping, Pong, Propose, Ready, Refused, Status, Withdraw
from .rounds import Known, Place, Round
from .standing import NOTHING
from .timing import Timing

_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class Formed:
    """A round has begun, and we are in it."""

    round: Round
    place: Place
    started: int
    reason: str
    distrusted: tuple[str, ...] = ()
    """Checkpoints that any node of it distrusts."""
    keepers: tuple[str, ...] = ()
    """Those of the next nodes, "ADDRESS PORT"."""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """Our round is over. `at_once`: kill the ranks, for others may be about to go on without us."""

    reason: str
    at_once: bool = False


@dataclass(frozen=True, kw_only=True)
class Ended:
    """There is nothing left to take part in."""

    reason: str
    ok: bool = False


Note = Formed | Changed | Ended


class Member:
    """Fed with what happens, it leaves in `out` what is to be sent (endpoint, message) and in `notes` what the agent must know."""

    def __init__(self, node: str, name: str, timing: Timing, now: float) -> None:
        self.node = node
        self.name = name
        self.held = -1
        """The endpoint that this agent holds itself, if any."""
        self.known = Known()
        self.out: list[tuple[int, Message]] = []
        self.notes: list[Note] = []
        self.dropped: list[int] = []
        """Endpoints whose connection is to be closed."""
        self.training = False
        self.following: int | None = None
        self.over = False
        """Whether there is nothing left to take part in."""
        self.running = False
        """Whether a round is under way, ours or one that we are not in."""
        self.durable = -1
        self.behind_s = 0.0
        """How far this clock is behind the leader's."""
        self._timing = timing
        self._ready: Ready | None = None
        self._status: dict[int, Status] = {}
        self._down: set[int] = set()
        self._left = False
        self._gone: set[str] = set()
        self._lost: set[str] = set()
        self._counted = self._counted_next = NOTHING
        """What the leader of our round had counted when it began, and the one of the newest that we have acknowledged."""
        self._seeks_t = now
        self._heard_t = now
        self._lease_t = now
        self._acked_t = now
        self._count = 0
        self._sent: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._tick_t = now

    @property
    def led_by(self) -> int | None:
        """The endpoint whose holder leads us; None while nobody does."""
        k = self.following
        return k if k is not None and k in self._status and self._status[k].leading else None

    # -- what the agent wants ------------------------------------------------------------------------------------------

    def ready(self, ready: Ready) -> None:
        """Our ranks are stopped: we want a place in the next round."""
        self.training = False
        self._ready = ready
        self._say(ready)

    def leave(self, leave: Leave) -> None:
        """We take part no more."""
        self.training, self._ready, self._left = False, None, True
        self._say(leave)

    # -- what happens --------------------------------------------------------------------------------------------------

    def link_down(self, k: int, now: float, *, ended: bool) -> None:
        """The connection to endpoint `k` is gone, or could not be made. `ended`: its process has ended, as far as the network tells."""
        status = self._status.pop(k, None)
        self._down.add(k)
        if k == self.following:
            self.following = None
            self._seeks_t = now
            if ended and status is not None and status.leading and now - self._lease_t <= self._timing.dead_s:
                self._gone.add(status.node)  # it cannot have gone on without us: it heard us a moment ago
        self._choose(now)

    def forget(self, k: int) -> None:
        """The connection to endpoint `k`, which we did not need, was closed by us."""
        self._status.pop(k, None)

    def receive(self, k: int, message: Message, now: float) -> None:
        """`message` came from endpoint `k`."""
        self._fence(now)
        if isinstance(message, Status):
            self._down.discard(k)
            self._status[k] = message
            self._choose(now)
        elif k != self.following:
            return
        elif isinstance(message, Ping):
            self._ping(k, message, now)
        elif isinstance(message, Change) and self.training:
            self._over(Changed(reason=message.reason))
        elif isinstance(message, Propose):
            self._propose(message, now)
        elif isinstance(message, Commit):
            self._commit(message)
        elif isinstance(message, Closed):
            self._over(Ended(reason=message.reason, ok=message.ok))
        elif isinstance(message, Refused):
            self._over(Ended(reason=message.reason))

    def tick(self, now: float) -> None:
        """Time has passed."""
        stalled = max(now - self._tick_t - 2 * self._timing.beat_s, 0.0)
        self._tick_t = now
        self._heard_t += stalled  # what was sent while this process stood still has not been read yet
        self._fence(now)
        if self.following is not None and now - self._heard_t > self._timing.dead_s:
            k, self.following, self._seeks_t = self.following, None, now
            if (status := self._status.pop(k, None)) is not None and status.leading:
                self._lost.add(status.node)
            self._down.add(k)
            self.dropped.append(k)
        self._choose(now)

    def wanted(self, endpoints: int) -> set[int]:
        """The endpoints to be connected to: one that leads, else all."""
        return set(range(endpoints)) if self.led_by is None else {self.led_by}

    # -- how -----------------------------------------------------------------------------------------------------------

    def _fence(self, now: float) -> None:
        if self.training and now - self._lease_t > self._timing.fence_s:
            ago = f"{now - self._lease_t:.1f} s (and nothing at all for {now - self._heard_t:.1f} s)"
            reason = f"this node has had no word from a majority for {ago}: frozen, or cut off"
            self._over(Changed(reason=reason, at_once=True))

    def _over(self, note: Note) -> None:
        self.training = False
        self.over = self.over or isinstance(note, Ended)
        self.notes.append(note)

    def _choose(self, now: float) -> None:
        """Follow the endpoint that leads; where none does, the first that answers."""
        if self._left:  # who has left must not be counted again
            if self.following is None and not self.over:
                self._over(Ended(reason="the leader has gone", ok=True))
            return
        if self.following is not None and (status := self._status.get(self.following)) is not None and status.leading:
            return
        leading = [k for k in sorted(self._status) if self._status[k].leading and self._status[k].node not in self._gone]
        answering = [k for k in sorted(self._status) if self._status[k].node not in self._gone]
        best = next(iter(leading or answering), None)
        if best is None or best == self.following:
            return
        if not leading and now - self._seeks_t < self._timing.settle_s and not self._down.issuperset(range(best)):
            return
        if self.following is not None:
            self._say(Withdraw())
        self.following, self._heard_t = best, now
        self._count, self._sent = 0, deque(maxlen=_KEPT)
        self._say(Hello(self.node, self.name, self.held, self.known, tuple(self._gone), tuple(self._lost), self._counted))
        if self._ready is not None:
            self._say(self._ready)

    def _ping(self, k: int, ping: Ping, now: float) -> None:
        self._heard_t = now
        status = self._status[k]
        if status.leading != ping.leading:
            self._status[k] = Status(status.node, ping.leading)
        self.running = ping.running
        sent_t = next((t for m, t in self._sent if m == ping.heard), None)
        if sent_t is not None and ping.leading:
            self._lease_t = max(self._lease_t, sent_t - ping.age_s)
        self._count += 1
        self._sent.append((self._count, now))
        self._say(Pong(ping.n, self._count, self.durable, self.behind_s))

    def _propose(self, message: Propose, now: float) -> None:
        proposed = message.round
        if self._ready is None or self.node not in proposed.nodes or proposed.generation <= self.known.generation:
            return
        self.known = Known(self.known.committed, (*self.known.pending, proposed))
        self._acked_t, self._counted_next = now, message.counted
        self._say(Ack(proposed.generation))

    def _commit(self, commit: Commit) -> None:
        agreed = next((r for r in self.known.pending if r.generation == commit.generation), None)
        if agreed is None or self._ready is None:
            return
        self.known, self._counted = Known(agreed), self._counted_next
        self._lost.clear()
        self.training, self._ready, self._lease_t = True, None, max(self._lease_t, self._acked_t)
        formed = Formed(
            round=agreed,
            place=commit.place,
            started=commit.started,
            reason=commit.reason,
            distrusted=commit.distrusted,
            keepers=commit.keepers,
        )
        self.notes.append(formed)

    def _say(self, message: Message) -> None:
        if self.following is not None:
            self.out.append((self.following, message))
