"""The holder of an endpoint, who leads the job if most of it follows: counts nodes and makes rounds. Pure: no clock, no socket."""

from __future__ import annotations

from .messages import Ack, Change, Closed, Commit, Hello, Leave, Message, Ping, Pong, Propose, Ready, Refused, Status, Withdraw
from .roster import Peer, Roster, silence
from .rounds import Place, Round
from .timing import Timing


class Leader:
    """Fed with what happens, it leaves in `out` what is to be sent (link, message). Links are numbers that the caller gives."""

    def __init__(self, node: str, endpoints: int, nnodes: tuple[int, int], timing: Timing, now: float, spares: int | None = None) -> None:
        self.node = node
        self.leading = False
        self.roster = Roster(endpoints, timing)
        self.out: list[tuple[int, Message]] = []
        self.dropped: list[int] = []
        self.closed: Closed | None = None
        self.stirred = False
        """Whether `tick` has something to decide."""
        self._links: set[int] = set()
        self._least, self._most = nnodes
        self._spares = spares
        self._timing = timing
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
        if (peer := self.roster.peers.get(link)) is None:
            return
        if ended and now - peer.acked_t <= self._timing.dead_s:
            self.roster.gone.add(peer.hello.node)  # it followed us to its end
        name = peer.hello.name
        self.roster.drop(link, f"{name} was lost: its agent has ended" if ended else f"the connection to {name} is broken")
        self.stirred = True

    def receive(self, link: int, message: Message, now: float) -> None:
        """`message` came over `link`."""
        if isinstance(message, Hello):
            self._hello(link, message, now)
        if (peer := self.roster.peers.get(link)) is None:
            return
        silent_s, peer.heard_t = now - peer.heard_t, now
        if isinstance(message, Pong):
            peer.durable, peer.newest = message.durable, message.m
            peer.acked_t = max(peer.acked_t, next((t for n, t in peer.pings if n == message.n), peer.acked_t))
            self.stirred = self.stirred or not self.leading
            if silent_s > 2 * self._timing.beat_s:  # one of us stood still: renew the other's certainty before it runs out
                self._lease_t = self.roster.majority_since()
                self._ping(link, now)
            return
        if isinstance(message, Ready):
            peer.ready, peer.ready_t, peer.ready_from = message, now, self.roster.durable
            self._highest = max(self._highest, message.next - 1)
        elif isinstance(message, Ack):
            peer.acked = max(peer.acked, message.generation)
        elif isinstance(message, Withdraw):
            self.roster.drop(link, f"{peer.hello.name} has turned away")
        elif isinstance(message, Leave):
            self._leave(link, peer, message)
        self.stirred = True

    def tick(self, now: float, *, beat: bool = True) -> None:
        """Time has passed; or (`beat` False) something has `stirred`, and all that came with it has been received."""
        self.stirred = False
        if beat:
            stalled = max(now - self._tick_t - 2 * self._timing.beat_s, 0.0)
            self._tick_t = now
            for link, peer in list(self.roster.peers.items()):
                peer.heard_t += stalled  # what was sent while this process stood still has not been read yet
                if now - peer.heard_t > self._timing.dead_s:
                    self.dropped.append(link)
                    self.roster.drop(link, f"{peer.hello.name} was lost: {silence(self._timing)}")
        self._judge(now)
        if beat and now - self._pinged_t >= self._timing.beat_s:
            self._pinged_t = now
            for link in self.roster.peers:
                self._ping(link, now)
        if self.leading and self.closed is None:
            self._go_on(now)

    # -- whether to lead, and whom -------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        self._lease_t = self.roster.majority_since()
        leads = now - self._lease_t <= self._timing.fence_s
        if leads and not self.leading:
            self.roster.learn(now)
            self._led_t, self._proposal = now, None
        if leads != self.leading:
            self.leading, self._proposal = leads, None
            for link in self._links:
                self.out.append((link, Status(self.node, leads)))

    def _hello(self, link: int, hello: Hello, now: float) -> None:
        roster = self.roster
        roster.gone |= set(hello.gone)
        refused = "this agent was taken for ended" if hello.node in roster.gone else roster.standing.refuses(hello.name)
        if refused:
            self.out.append((link, Refused(refused)))
            return
        roster.take(link, hello, now)
        self._highest = max(self._highest, hello.known.generation)
        self._ping(link, now)
        if self.closed is not None:
            self.out.append((link, self.closed))
        elif self._spares is not None and len(roster.peers) > self._most + self._spares:
            self.out.append((link, Refused(f"the job has its {self._most} nodes and {self._spares} in reserve")))

    def _leave(self, link: int, peer: Peer, leave: Leave) -> None:
        node = peer.hello.node
        if leave.done:
            peer.done = True
            self.roster.done.add(node)
            return
        self.roster.gone.add(node)  # it has said that it will not speak again
        reason = f"{peer.hello.name} has left: {leave.reason}"
        self.roster.drop(link, reason)
        if node == self.node:  # the next leader has to be found, but why should not be a riddle
            self.out += [(other, Change(reason)) for other in self.roster.peers]
        if leave.closes:
            self._close(Closed(f"{peer.hello.name}: {leave.reason}", ok=False))

    def _close(self, closed: Closed) -> None:
        self.closed = closed
        for link in self.roster.peers:
            self.out.append((link, closed))

    def _ping(self, link: int, now: float) -> None:
        peer = self.roster.peers[link]
        peer.count += 1
        peer.pings.append((peer.count, now))
        age = now - self._lease_t if self.leading else 0.0
        running = self.roster.committed is not None and not self._reason
        self.out.append((link, Ping(peer.count, peer.newest, self.leading, age, running, 0.0)))

    # -- the next round ------------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        if self._proposal is not None:
            self._conclude(now)
            return
        roster, staying = self.roster, self.roster.staying
        if roster.committed is not None:
            nodes = set(roster.committed.nodes)
            members = [p for p in staying if p.hello.node in nodes]
            if not members and roster.done & nodes and not roster.still_coming(self._led_t, now):
                self._close(Closed("all nodes are done", ok=True))
                return
            reason = roster.missing() or self._why(members, now)
            if not reason:
                return
            if not self._reason or roster.amiss():  # what began it, or what is worse
                self._reason = reason
            for link, p in roster.peers.items():
                if p.hello.node in nodes and not p.done and p.ready is None and p.told < roster.generation:
                    p.told = roster.generation
                    self.out.append((link, Change(reason)))
            if any(p.ready is None for p in members) or roster.still_coming(self._led_t, now):
                return
        self._propose([p for p in staying if p.ready is not None], now)

    def _why(self, members: list[Peer], now: float) -> str:
        """Why the round under way, all of whose nodes are there, must end all the same; empty if it need not."""
        if again := next((p for p in members if p.ready is not None), None):
            return f"the ranks of {again.hello.name} start over"
        if len(members) < self._most:
            nodes = {p.hello.node for p in members}
            for p in self.roster.staying:
                if p.ready is not None and p.hello.node not in nodes and self._may_join(p, now):
                    return f"{p.hello.name} joins"
        return ""

    def _may_join(self, p: Peer, now: float) -> bool:
        durable = self.roster.durable
        return durable < 0 or durable > p.ready_from or now - p.ready_t > self._timing.grow_s

    def _propose(self, ready: list[Peer], now: float) -> None:
        if len(ready) + len(self.roster.done) < self._least:
            self._enough_t = None
            return
        if not ready:
            return
        if self._enough_t is None:
            self._enough_t = now
        if self.roster.committed is None and len(ready) < self._most and now - self._enough_t < self._timing.last_call_s:
            return
        nodes = tuple(p.hello.node for p in _in_order(ready, self.roster.committed)[: self._most])
        generation = self._highest = max(self._highest, self.roster.generation) + 1
        proposed = Round(generation, nodes, self.node)
        self._proposal = (proposed, now)
        question, invited = Propose(proposed, self.roster.standing.counted(nodes, self.roster.durable, now)), set(nodes)
        for link, p in self.roster.peers.items():
            if p.hello.node in invited:
                self.out.append((link, question))

    def _conclude(self, now: float) -> None:
        assert self._proposal is not None
        proposed, since_t = self._proposal
        invited = set(proposed.nodes)
        seated = {link: p for link, p in self.roster.peers.items() if p.hello.node in invited and p.ready is not None and not p.done}
        if len(seated) < len(proposed.nodes) or now - since_t > self._timing.answer_s:
            self._proposal = None
            self._go_on(now)
            return
        if any(p.acked < proposed.generation for p in seated.values()):
            return
        readies = [p.ready for p in seated.values() if p.ready is not None]
        started = max(r.started for r in readies)
        distrusted = tuple(dict.fromkeys(said for r in readies for said in r.distrusted))
        self.roster.begin(proposed, now)
        self._proposal, self._enough_t = None, None
        because, self._reason = self._reason, ""
        by_node = {p.hello.node: p for p in seated.values()}
        in_order = [by_node[n] for n in proposed.nodes]
        places, keepers = _places(in_order), next_keepers(in_order)
        for link, p in seated.items():
            p.ready, node = None, p.hello.node
            self.out.append((link, Commit(proposed.generation, places[node], started, because, distrusted, keepers[node])))


def _in_order(ready: list[Peer], under_way: Round | None) -> list[Peer]:
    """The nodes that go on, in the order that they had, or turned by one if a node asks for that; after them those that are new."""
    before = {n: i for i, n in enumerate(under_way.nodes)} if under_way is not None else {}
    stay = sorted((p for p in ready if p.hello.node in before), key=lambda p: before[p.hello.node])
    if any(p.ready is not None and p.ready.turn for p in stay):
        stay = stay[1:] + stay[:1]
    new = [p for p in ready if p.hello.node not in before]
    return stay + sorted(new, key=_rank_of_new)


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


def next_keepers(peers: list[Peer]) -> dict[str, tuple[str, ...]]:
    """To which keepers each node's sends copies, by node: those of the next nodes, in a ring of all that take any."""
    ring = [(p, p.ready) for p in peers if p.ready is not None and p.ready.keeper]
    found = {p.hello.node: () for p in peers} | dict[str, tuple[str, ...]]()
    for i, (p, r) in enumerate(ring):
        after = (ring[(i + k) % len(ring)][1] for k in range(1, min(r.copies, len(ring) - 1) + 1))
        found[p.hello.node] = tuple(f"{other.address} {other.keeper}" for other in after)
    return found


def _rank_of_new(p: Peer) -> tuple[int, float, tuple[int, ...], str, str]:
    assert p.ready is not None
    held = float(p.hello.held) if p.hello.held >= 0 else float("inf")
    numbers = tuple(int(x) for x in p.ready.address.split(".") if x.isdigit())
    return p.ready.hint, held, numbers, p.ready.address, p.hello.node
