"""The holder of an endpoint, who leads the job if most of it follows: counts nodes and makes rounds. Pure: no clock, no socket."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from .messages import Ack, Change, Closed, Commit, Hello, Leave, Message, Ping, Pong, Propose, Ready, Refused, Status, Withdraw
from .rounds import Known, Place, Round, may_lead
from .timing import Timing

_KEPT = 64
_IN_VAIN = 3
_SOON_S = 60.0


@dataclass(kw_only=True)
class Peer:
    """A node that follows."""

    hello: Hello
    heard_t: float
    acked_t: float = float("-inf")
    """When the newest ping that it has answered was sent: it follows nobody else before that and `dead_s`."""
    pings: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    count: int = 0
    newest: int = 0
    ready: Ready | None = None
    ready_from: int = -1
    """The newest durable checkpoint when it got ready."""
    ready_t: float = 0.0
    durable: int = -1
    acked: int = -1
    told: int = -1
    """The generation whose end it was told of."""
    done: bool = False


class Leader:
    """Fed with what happens, it leaves in `out` what is to be sent (link, message). Links are numbers that the caller gives."""

    def __init__(self, node: str, endpoints: int, nnodes: tuple[int, int], timing: Timing, now: float, spares: int | None = None) -> None:
        self.node = node
        self.leading = False
        self.committed: Round | None = None
        self.peers: dict[int, Peer] = {}
        self._links: set[int] = set()
        self.out: list[tuple[int, Message]] = []
        self.dropped: list[int] = []
        self.closed: Closed | None = None
        self.stirred = False
        """Whether `tick` has something to decide."""
        self._endpoints = endpoints
        self._least, self._most = nnodes
        self._spares = spares
        self._timing = timing
        self._gone: set[str] = set()
        self._done: set[str] = set()
        self._joined: dict[str, tuple[int, float]] = {}
        """The newest durable checkpoint when a node of the round under way came in, and when that was."""
        self._in_vain: dict[str, int] = {}
        """How often in a row a machine was lost before a checkpoint was made with it."""
        self._lost: dict[str, tuple[str, float]] = {}
        """Nodes of the round under way that we have lost: the words for it, and when they were heard last."""
        self._proposal: tuple[Round, float] | None = None
        self._reason = ""
        self._highest = -1
        self._led_t = now
        self._lease_t = now
        self._enough_t: float | None = None
        self._pinged_t = now
        self._tick_t = now

    # -- what happens --------------------------------------------------------------------------------------------------

    def link_up(self, link: int) -> None:
        """Somebody has connected."""
        self._links.add(link)
        self.out.append((link, Status(self.node, self.leading)))

    def link_down(self, link: int, now: float, *, ended: bool) -> None:
        """A connection is gone. `ended`: the other process has ended, as far as the network tells."""
        self._links.discard(link)
        if (peer := self.peers.get(link)) is None:
            return
        if ended and now - peer.acked_t <= self._timing.dead_s:
            self._gone.add(peer.hello.node)  # it followed us to its end
        self._drop(link, f"{peer.hello.name} was lost: its agent has ended" if ended else f"the connection to {peer.hello.name} is broken")
        self.stirred = True

    def receive(self, link: int, message: Message, now: float) -> None:
        """`message` came over `link`."""
        if isinstance(message, Hello):
            self._hello(link, message, now)
        if (peer := self.peers.get(link)) is None:
            return
        silent_s, peer.heard_t = now - peer.heard_t, now
        if isinstance(message, Pong):
            peer.durable, peer.newest = message.durable, message.m
            peer.acked_t = max(peer.acked_t, next((t for n, t in peer.pings if n == message.n), peer.acked_t))
            self.stirred = self.stirred or not self.leading
            if silent_s > 2 * self._timing.beat_s:  # one of us stood still: renew the other's certainty before it runs out
                self._lease_t = self._majority_since()
                self._ping(link, now)
            return
        if isinstance(message, Ready):
            peer.ready, peer.ready_t, peer.ready_from = message, now, self._durable()
            self._highest = max(self._highest, message.next - 1)
        elif isinstance(message, Ack):
            peer.acked = max(peer.acked, message.generation)
        elif isinstance(message, Withdraw):
            self._drop(link, f"{peer.hello.name} has turned away")
        elif isinstance(message, Leave):
            self._leave(link, peer, message)
        self.stirred = True

    def tick(self, now: float, *, beat: bool = True) -> None:
        """Time has passed; or (`beat` False) something has `stirred`, and all that came with it has been received."""
        self.stirred = False
        if beat:
            stalled = max(now - self._tick_t - 2 * self._timing.beat_s, 0.0)
            self._tick_t = now
            for link, peer in list(self.peers.items()):
                peer.heard_t += stalled  # what was sent while this process stood still has not been read yet
                if now - peer.heard_t > self._timing.dead_s:
                    self.dropped.append(link)
                    self._drop(link, f"{peer.hello.name} was lost: {_silent(self._timing)}")
        self._judge(now)
        if beat and now - self._pinged_t >= self._timing.beat_s:
            self._pinged_t = now
            for link in self.peers:
                self._ping(link, now)
        if self.leading and self.closed is None:
            self._go_on(now)

    # -- whether to lead -----------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        self._lease_t = self._majority_since()
        leads = now - self._lease_t <= self._timing.fence_s
        if leads and not self.leading:
            newest = [r for p in self.peers.values() if (r := p.hello.known.committed) and r.generation > self._committed_generation]
            if newest:
                self.committed = max(newest, key=lambda r: r.generation)
                self._lost.clear()
            self._led_t, self._proposal = now, None
        if leads != self.leading:
            self.leading, self._proposal = leads, None
            for link in self._links:
                self.out.append((link, Status(self.node, leads)))

    def _majority_since(self) -> float:
        """The latest moment at which a majority is known to have followed; long ago if none does."""
        ages = sorted({p.acked_t for p in self.peers.values()}, reverse=True)
        at = bisect_left(ages, True, key=lambda t: self._suffices({p.hello.node for p in self.peers.values() if p.acked_t >= t}))
        return ages[at] if at < len(ages) else float("-inf")

    def _suffices(self, nodes: set[str]) -> bool:
        followers = [p for p in self.peers.values() if p.hello.node in nodes]
        known = {p.hello.node: p.hello.known for p in followers} | {"": Known(self.committed)}  # what they said may be old by now
        return may_lead(known, nodes, self._gone | self._done, {p.hello.held for p in followers} - {-1}, self._endpoints)

    @property
    def _committed_generation(self) -> int:
        return self.committed.generation if self.committed is not None else -1

    # -- who is there --------------------------------------------------------------------------------------------------

    def _hello(self, link: int, hello: Hello, now: float) -> None:
        self._gone |= set(hello.gone)
        if hello.node in self._gone:
            self.out.append((link, Refused("this agent was taken for ended")))
            return
        for other, peer in list(self.peers.items()):
            if peer.hello.node == hello.node:
                del self.peers[other]  # it comes over a new connection
        if self._in_vain.get(hello.name, 0) >= _IN_VAIN:
            why = f"{hello.name} was lost {_IN_VAIN} times in a row before a checkpoint was made with it; the job goes on without it"
            self.out.append((link, Refused(why)))
            return
        self.peers[link] = Peer(hello=hello, heard_t=now)
        self._lost.pop(hello.node, None)
        self._highest = max(self._highest, hello.known.generation)
        self._ping(link, now)
        if self.closed is not None:
            self.out.append((link, self.closed))
        elif self._spares is not None and len(self.peers) > self._most + self._spares:
            self.out.append((link, Refused(f"the job has its {self._most} nodes and {self._spares} in reserve")))

    def _drop(self, link: int, reason: str) -> None:
        peer = self.peers.pop(link)
        if self.committed is not None and peer.hello.node in self.committed.nodes:
            self._lost[peer.hello.node] = reason, peer.heard_t
            self._count(peer)

    def _count(self, lost: Peer) -> None:
        """A machine that comes and is lost again, and again, costs the others a restart each time."""
        name = lost.hello.name
        durable, joined_t = self._joined.get(lost.hello.node, (-1, float("-inf")))
        in_vain = self._durable() <= durable if durable >= 0 else lost.heard_t - joined_t < _SOON_S
        alone = not any(p.hello.name == name for p in self.peers.values())  # else it is one machine for several nodes: a test
        self._in_vain[name] = self._in_vain.get(name, 0) + 1 if in_vain and alone else 0

    def _leave(self, link: int, peer: Peer, leave: Leave) -> None:
        node = peer.hello.node
        if leave.done:
            peer.done = True
            self._done.add(node)
            return
        self._gone.add(node)  # it has said that it will not speak again
        reason = f"{peer.hello.name} has left: {leave.reason}"
        self._drop(link, reason)
        if node == self.node:  # the next leader has to be found, but why should not be a riddle
            self.out += [(other, Change(reason)) for other in self.peers]
        if leave.closes:
            self._close(Closed(f"{peer.hello.name}: {leave.reason}", ok=False))

    def _close(self, closed: Closed) -> None:
        self.closed = closed
        for link in self.peers:
            self.out.append((link, closed))

    def _ping(self, link: int, now: float) -> None:
        peer = self.peers[link]
        peer.count += 1
        peer.pings.append((peer.count, now))
        age = now - self._lease_t if self.leading else 0.0
        self.out.append((link, Ping(peer.count, peer.newest, self.leading, age, self.committed is not None and not self._reason, 0.0)))

    # -- the next round ------------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        if self._proposal is not None:
            self._conclude(now)
            return
        staying = [p for p in self.peers.values() if not p.done]
        if self.committed is not None:
            members = [p for p in staying if p.hello.node in self.committed.nodes]
            if not members and self._done & set(self.committed.nodes) and not self._still_coming(now):
                self._close(Closed("all nodes are done", ok=True))
                return
            reason = self._why(members, now)
            if reason is None:
                return
            if not self._reason or set(self.committed.nodes) & set(self._lost):  # what began it, or what is worse
                self._reason = reason
            for link, p in self.peers.items():
                if p in members and p.ready is None and p.told < self._committed_generation:
                    p.told = self._committed_generation
                    self.out.append((link, Change(reason)))
            if any(p.ready is None for p in members) or self._still_coming(now):
                return
        self._propose([p for p in staying if p.ready is not None], now)

    def _why(self, members: list[Peer], now: float) -> str | None:
        """Why the round under way must end, if it must."""
        assert self.committed is not None
        absent = set(self.committed.nodes) - {p.hello.node for p in self.peers.values()} - self._done
        if absent:
            return "; ".join(self._what_became_of(n) for n in self.committed.nodes if n in absent)
        if again := next((p for p in members if p.ready is not None), None):
            return f"the ranks of {again.hello.name} start over"
        if len(members) < self._most:
            for p in self.peers.values():
                if p.ready is not None and p not in members and not p.done and self._may_join(p, now):
                    return f"{p.hello.name} joins"
        return None

    def _what_became_of(self, node: str) -> str:
        name = node.partition(":")[0]
        if node in self._lost:
            return self._lost[node][0]
        if any(node in p.hello.gone for p in self.peers.values()):
            return f"{name}, which led the job, was lost: its agent has ended"
        if any(node in p.hello.lost for p in self.peers.values()):
            return f"{name}, which led the job, was lost: {_silent(self._timing)}"
        return f"{name} was lost"

    def _may_join(self, p: Peer, now: float) -> bool:
        durable = self._durable()
        return durable < 0 or durable > p.ready_from or now - p.ready_t > self._timing.grow_s

    def _durable(self) -> int:
        return max((p.durable for p in self.peers.values()), default=-1)

    def _still_coming(self, now: float) -> bool:
        """Whether nodes may still turn up, or still train: one that was not heard for `dead_s` has stopped, one that ended has, too."""
        assert self.committed is not None
        here = {p.hello.node for p in self.peers.values()}
        missing = set(self.committed.nodes) - here - self._gone - self._done
        silent = {n for p in self.peers.values() for n in p.hello.lost}
        return any(now - self._lost[n][1] < self._timing.dead_s for n in missing if n in self._lost) or (
            bool(missing - silent - set(self._lost)) and now - self._led_t < self._timing.return_s
        )

    def _propose(self, ready: list[Peer], now: float) -> None:
        if len(ready) + len(self._done) < self._least:
            self._enough_t = None
            return
        if not ready:
            return
        if self._enough_t is None:
            self._enough_t = now
        if self.committed is None and len(ready) < self._most and now - self._enough_t < self._timing.last_call_s:
            return
        nodes = tuple(p.hello.node for p in self._in_order(ready)[: self._most])
        generation = self._highest = max(self._highest, self._committed_generation) + 1
        proposed = Round(generation, nodes, self.node)
        self._proposal = (proposed, now)
        question, invited = Propose(proposed), set(nodes)
        for link, p in self.peers.items():
            if p.hello.node in invited:
                self.out.append((link, question))

    def _in_order(self, ready: list[Peer]) -> list[Peer]:
        """The nodes that go on, in the order that they had; after them those that are new."""
        before = {n: i for i, n in enumerate(self.committed.nodes)} if self.committed is not None else {}
        stay = sorted((p for p in ready if p.hello.node in before), key=lambda p: before[p.hello.node])
        new = [p for p in ready if p.hello.node not in before]
        return stay + sorted(new, key=_rank_of_new)

    def _conclude(self, now: float) -> None:
        assert self._proposal is not None
        proposed, since_t = self._proposal
        invited = set(proposed.nodes)
        seated = {link: p for link, p in self.peers.items() if p.hello.node in invited and p.ready is not None and not p.done}
        if len(seated) < len(proposed.nodes) or now - since_t > self._timing.answer_s:
            self._proposal = None
            self._go_on(now)
            return
        if any(p.acked < proposed.generation for p in seated.values()):
            return
        started = max(p.ready.started for p in seated.values() if p.ready is not None)
        self.committed, self._proposal = proposed, None
        because, self._reason = self._reason, ""
        self._lost.clear()
        self._enough_t = None
        self._joined = {n: self._joined.get(n, (self._durable(), now)) for n in proposed.nodes}
        by_node = {p.hello.node: p for p in seated.values()}
        places = _places([by_node[n] for n in proposed.nodes])
        for link, p in seated.items():
            p.ready = None
            self.out.append((link, Commit(proposed.generation, places[p.hello.node], started, because)))


def _silent(timing: Timing) -> str:
    return f"no word for {timing.dead_s} s (frozen, or cut off)"


def _places(peers: list[Peer]) -> dict[str, Place]:
    """Where each node's ranks begin, by node; `peers` is in rank order."""
    readies = [p.ready for p in peers if p.ready is not None]
    world, base, of_role = sum(r.size for r in readies), 0, dict[str, int]()
    total_of_role = {role: sum(x.size for x in readies if x.role == role) for role in {r.role for r in readies}}
    places = {}
    for rank, (p, r) in enumerate(zip(peers, readies, strict=True)):
        begin = of_role.get(r.role, 0)
        places[p.hello.node] = Place(rank, len(peers), base, world, begin, total_of_role[r.role], readies[0].address, readies[0].port)
        base, of_role[r.role] = base + r.size, begin + r.size
    return places


def _rank_of_new(p: Peer) -> tuple[int, float, tuple[int, ...], str, str]:
    assert p.ready is not None
    held = float(p.hello.held) if p.hello.held >= 0 else float("inf")
    numbers = tuple(int(x) for x in p.ready.address.split(".") if x.isdigit())
    return p.ready.hint, held, numbers, p.ready.address, p.hello.node
