"""Who follows one leader, who was lost, who has ended: what it decides by. Pure: no clock, no socket."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from .messages import Hello, Ready
from .rounds import Known, Round, may_lead
from .standing import Standing
from .timing import Timing

_KEPT = 64


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


class Roster:
    """The nodes that follow, by the number of their link, and what is known of the others of the round under way."""

    def __init__(self, endpoints: int, timing: Timing) -> None:
        self.peers: dict[int, Peer] = {}
        self.committed: Round | None = None
        """The round under way."""
        self.gone: set[str] = set()
        """Nodes that have ended, or have said that they will not speak again."""
        self.done: set[str] = set()
        """Nodes whose ranks have all ended with 0."""
        self.standing = Standing()
        self._lost: dict[str, tuple[str, float]] = {}
        """Nodes of the round under way that we have lost: the words for it, and when they were heard last."""
        self._endpoints = endpoints
        self._timing = timing

    @property
    def generation(self) -> int:
        """That of the round under way; -1 if there is none."""
        return self.committed.generation if self.committed is not None else -1

    @property
    def durable(self) -> int:
        """The newest durable checkpoint that anybody knows of; -1 if there is none."""
        return max((p.durable for p in self.peers.values()), default=-1)

    @property
    def staying(self) -> list[Peer]:
        """Those whose ranks are not done."""
        return [p for p in self.peers.values() if not p.done]

    # -- coming and going ----------------------------------------------------------------------------------------------

    def take(self, link: int, hello: Hello, now: float) -> None:
        """A node follows, maybe over a new connection."""
        for other, peer in list(self.peers.items()):
            if peer.hello.node == hello.node:
                del self.peers[other]
        self.peers[link] = Peer(hello=hello, heard_t=now)
        self._lost.pop(hello.node, None)

    def drop(self, link: int, reason: str) -> None:
        """A node follows no more."""
        peer = self.peers.pop(link)
        if self.committed is not None and peer.hello.node in self.committed.nodes:
            self._lost[peer.hello.node] = reason, peer.heard_t
            name = peer.hello.name
            alone = not any(p.hello.name == name for p in self.peers.values())
            self.standing.lost(peer.hello.node, name, self.durable, peer.heard_t, alone=alone)

    def learn(self, now: float) -> None:
        """Before leading: take up the newest round that a follower knows of, and what its leader had counted."""
        told = [(r.generation, p.hello) for p in self.peers.values() if (r := p.hello.known.committed) and r.generation > self.generation]
        if told:
            _, hello = max(told, key=lambda x: x[0])
            self.committed = hello.known.committed
            self.standing.learn(hello.counted, now)
            self._lost.clear()

    def begin(self, agreed: Round, now: float) -> None:
        """All have acknowledged a round: it is the one under way."""
        self.committed = agreed
        self._lost.clear()
        self.standing.began(agreed.nodes, self.durable, now)

    # -- whether they suffice ------------------------------------------------------------------------------------------

    def majority_since(self) -> float:
        """The latest moment at which a majority is known to have followed; long ago if none does."""
        ages = sorted({p.acked_t for p in self.peers.values()}, reverse=True)
        at = bisect_left(ages, True, key=lambda t: self._suffice({p.hello.node for p in self.peers.values() if p.acked_t >= t}))
        return ages[at] if at < len(ages) else float("-inf")

    def _suffice(self, nodes: set[str]) -> bool:
        followers = [p for p in self.peers.values() if p.hello.node in nodes]
        known = {p.hello.node: p.hello.known for p in followers} | {"": Known(self.committed)}  # what they said may be old by now
        return may_lead(known, nodes, self.gone | self.done, {p.hello.held for p in followers} - {-1}, self._endpoints)

    # -- who is missing ------------------------------------------------------------------------------------------------

    def amiss(self) -> bool:
        """Whether nodes of the round under way are known to be lost."""
        return self.committed is not None and bool(set(self.committed.nodes) & set(self._lost))

    def missing(self) -> str:
        """What became of the nodes of the round under way that neither follow nor are done; empty if there are none."""
        if self.committed is None:
            return ""
        absent = set(self.committed.nodes) - {p.hello.node for p in self.peers.values()} - self.done
        return "; ".join(self._what_became_of(n) for n in self.committed.nodes if n in absent)

    def still_coming(self, led_t: float, now: float) -> bool:
        """Whether nodes may still turn up, or still train: one that was not heard for `dead_s` has stopped, one that ended has, too."""
        assert self.committed is not None
        here = {p.hello.node for p in self.peers.values()}
        missing = set(self.committed.nodes) - here - self.gone - self.done
        silent = {n for p in self.peers.values() for n in p.hello.lost}
        return any(now - self._lost[n][1] < self._timing.dead_s for n in missing if n in self._lost) or (
            bool(missing - silent - set(self._lost)) and now - led_t < self._timing.return_s
        )

    def _what_became_of(self, node: str) -> str:
        name = node.partition(":")[0]
        if node in self._lost:
            return self._lost[node][0]
        if any(node in p.hello.gone for p in self.peers.values()):
            return f"{name}, which led the job, was lost: its agent has ended"
        if any(node in p.hello.lost for p in self.peers.values()):
            return f"{name}, which led the job, was lost: {silence(self._timing)}"
        return f"{name} was lost"


def silence(timing: Timing) -> str:
    """How a node was lost that was not heard."""
    return f"no word for {timing.dead_s} s (frozen, or cut off)"
