"""`--rdzv-backend goodrun`: the job's membership behind torch's RendezvousHandler, for goodrun's own launcher and for plain torchrun."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from ...checkpoint.sealed import job_key, keepers_key
from ..errors import UsageError
from ..events import ReplicasTold
from .messages import Leave, Ready
from .node import Changed, Ended, Formed, Job, Loop, Node, Note
from .scribe import Scribe
from .timing import Timing
from .wires import family_of

BACKEND = "goodrun"
SECRET_VARIABLE = "GOODRUN_JOB_SECRET"
DEFAULT_PORT = 29500
_JOIN_S = 600
_STORE_S = 60
_BYE_S = 0.5
_FINISH_S = 300.0
_NAMES_WITHIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Stand:
    """What a node brings into the next round. `next` is the least generation it can accept, `started` when its run began.

    `distrusted` and `turn` are as in messages.Ready.
    `keeper` is its keeper's port for other nodes, 0 for none; `copies` to how many of those that sends its snapshots.
    """

    next: int = 0
    started: int = 0
    size: int = 1
    role: str = ""
    distrusted: tuple[str, ...] = ()
    turn: bool = False
    keeper: int = 0
    copies: int = 0


class Membership(RendezvousHandler):
    """One agent's membership. Used by one thread; the node's own thread watches and answers meanwhile."""

    def __init__(
        self, parameters: RendezvousParameters, *, hint: int = 0, spares: int | None = None, record: tuple[Path, int] | None = None
    ) -> None:
        """Begin to look for the others.

        Args:
            parameters: torch's.
            hint: orders nodes that are new (torchrun's --node-rank).
            spares: how many nodes beyond the most may wait.
            record: the run's directory, and where in the record our part begins: the nodes tell each other of theirs.
        """
        self.stand = Stand()
        self.formed: Formed | None = None
        self.leave = Leave("its launcher has ended")
        """What is said to the others at the end."""
        self._run_id = parameters.run_id
        self._hint = hint
        self._join_s = float(parameters.get_as_int("join_timeout", _JOIN_S) or _JOIN_S)
        endpoints = resolve(parameters.endpoint)
        last_call = parameters.get_as_int("last_call_timeout")
        timing = Timing() if last_call is None else Timing(last_call_s=float(last_call))
        nnodes = (parameters.min_nodes, parameters.max_nodes)
        key = job_key(os.environ.get(SECRET_VARIABLE, ""), parameters.run_id)
        self.address = numeric(parameters.local_addr) if parameters.local_addr else outward(endpoints)
        """This node's address in the job."""
        self.keepers_key = keepers_key(key)
        self._endpoints = endpoints
        self._loop = Loop()
        name = socket.gethostname()
        local = self.address if parameters.local_addr else ""
        job = Job(key=key, endpoints=endpoints, nnodes=nnodes, timing=timing, spares=spares)
        self._node = Node(self._loop, job, f"{name.replace(' ', '')}:{os.getpid()}:{secrets.token_hex(4)}", name, local)
        self._scribe: Scribe | None = None
        if record is not None:
            gossip = self._node.gossip
            self._scribe = Scribe(*record, self._node.member.node, lambda lines: self._loop.call(lambda: gossip.own(lines)))
            gossip.keep = self._scribe.heard
            self._scribe.start()
        self._closed = False
        self._loop.call(self._node.start)
        self._loop.start()

    # -- torch's interface ---------------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        """The name under which it is registered."""
        return BACKEND

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """The store that we serve is the ranks': rank 0 must not try to serve one at its address."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round that we are in. Its first node serves a store that no earlier round has written to."""
        while True:
            listener = _listening(self.address)
            try:
                formed = self._wait_for_round(listener.getsockname()[1])
                store = self._store(formed, listener)
            finally:
                listener.close()
            if store is not None:
                self.formed = formed
                place = formed.place
                if self._scribe is not None:
                    self._scribe.nodes = place.nodes
                return RendezvousInfo(store, place.rank, place.nodes, RendezvousStoreInfo(place.address, place.port))

    def num_nodes_waiting(self) -> int:
        """1 when our round is over, for whatever reason: `news` says for which."""
        return int(self.news() is not None)

    def is_closed(self) -> bool:
        """Whether the job is over for us."""
        return self._closed or isinstance(self.news(), Ended)

    def set_closed(self) -> None:
        """End the job for all nodes."""
        self.leave = Leave("it closed the job", closes=True)
        self.shutdown()

    def shutdown(self) -> bool:
        """Sign off and close everything."""
        if not self._closed:
            self._closed = True
            leave = self.leave
            self._tell_all()
            self._loop.call(lambda: self._node.member.leave(leave))
            self._flush()
            self._loop.stop()
            if self._scribe is not None:
                self._scribe.close()
        return True

    # -- what goodrun's agent asks -------------------------------------------------------------------------------------

    @property
    def clock_behind_s(self) -> float:
        """How far this node's wall clock is behind that of the leader."""
        return self._node.member.behind_s

    def news(self, timeout_s: float = 0.0) -> Changed | Ended | None:
        """Why our round is over, once it is; waits up to `timeout_s` seconds for that."""
        with self._node.changed:
            self._node.changed.wait_for(lambda: bool(self._node.notes), timeout_s)
            return next((n for n in self._node.notes if not isinstance(n, Formed)), None)

    def replicas(self) -> list[ReplicasTold]:
        """What other nodes have told of their ranks' models since the last call."""
        return self._scribe.replicas() if self._scribe is not None else []

    def saved(self, step: int) -> None:
        """The newest durable checkpoint is that of `step`: nodes that wait to join may come in."""
        self._node.member.durable = step

    def finish(self, timeout_s: float = _FINISH_S) -> None:
        """Our ranks have all ended with 0: wait until those of the other nodes have, too."""
        self.leave = Leave("its ranks have ended with 0", done=True)
        leave = self.leave
        self._tell_all()
        self._loop.call(lambda: self._node.member.leave(leave))
        with self._node.changed:
            self._node.changed.wait_for(lambda: any(isinstance(n, Ended) for n in self._node.notes), timeout_s)

    # -- how -----------------------------------------------------------------------------------------------------------

    def _tell_all(self) -> None:
        """Whatever our record has is said before we take our leave."""
        if self._scribe is not None:
            with suppress(OSError):
                self._scribe.look()

    def _wait_for_round(self, port: int) -> Formed:
        stand, node = self.stand, self._node
        about = stand.size, stand.role, self._hint, stand.distrusted, stand.turn, stand.keeper, stand.copies
        ready = Ready(stand.next, stand.started, self.address, port, *about)

        def ask() -> None:
            with node.changed:
                node.notes[:] = [n for n in node.notes if isinstance(n, Ended)]
            node.member.ready(ready)

        self._loop.call(ask)
        end = time.monotonic() + self._join_s
        with node.changed:
            while True:
                formed: Formed | None = None
                for note in node.notes:
                    if isinstance(note, Ended):
                        raise RendezvousClosedError(note.reason)
                    formed = note if isinstance(note, Formed) else None
                if formed is not None:
                    node.notes.remove(formed)
                    return formed
                if node.notes:  # formed and over again before we looked
                    self._loop.call(ask)
                    node.notes.clear()
                left = end - time.monotonic()
                if left <= 0 and not node.member.running:
                    raise RendezvousTimeoutError(f"too few nodes after {self._join_s:.0f} s{self._why()}")
                node.changed.wait(max(left, 1.0))

    def _why(self) -> str:
        return f" ({self._node.trouble})" if self._node.member.following is None and self._node.trouble else ""

    def _store(self, formed: Formed, listener: socket.socket) -> TCPStore | None:
        """The round's store; None if the round was over before we had it."""
        place, timeout = formed.place, timedelta(seconds=_STORE_S)
        try:
            if place.rank == 0:
                fd = listener.detach()
                return TCPStore(place.address, place.port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=fd)
            return TCPStore(place.address, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as e:  # torch's store errors derive from it
            if self.news(Timing().dead_s + 1) is not None:
                return None
            where = f"the store of generation {formed.round.generation} at {place.address}"
            raise RendezvousConnectionError(f"cannot reach {where}: {e}") from e

    def _flush(self) -> None:
        """Give what was said last a moment to leave."""
        said = [False]

        def look() -> None:
            said[0] = True
            with self._node.changed:
                self._node.changed.notify_all()

        self._loop.call(lambda: self._loop.call(look))  # a turn later, when it has been written
        with self._node.changed:
            self._node.changed.wait_for(lambda: said[0] or self._loop.failed is not None, _BYE_S)


def _listening(address: str) -> socket.socket:
    """A socket for the store of a round, should this node come to serve it."""
    try:
        return socket.create_server((address, 0), family=family_of(address), backlog=1024)
    except OSError as e:
        raise RendezvousConnectionError(f"cannot listen at {address}: {os.strerror(e.errno or 0)}; choose another with --local-addr") from e


def numeric(host: str, patience_s: float = _NAMES_WITHIN_S) -> str:
    """The address of `host`, which may be one already. Where nodes get their names as they come up, others may have to wait for them."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as e:
            if time.monotonic() > end:
                raise UsageError(f"the host {host!r} has no address that this machine knows: {e.strerror}") from e
            time.sleep(0.5)


def resolve(endpoint: str) -> tuple[tuple[str, int], ...]:
    """The addresses of "host:port,host:port": those of nodes that may lead the job, in this order."""
    found = []
    for one in endpoint.split(","):
        host, _, port = one.strip().rpartition(":") if one.count(":") == 1 or "]:" in one else (one.strip(), "", str(DEFAULT_PORT))
        host = host.strip("[]")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"--rdzv-endpoint {one.strip()!r} is not HOST:PORT (or several such, separated by commas)")
        address = numeric(host)
        if address.startswith("127.") and host != "localhost" and not host.startswith("127."):
            address = outward(()) or address  # Debian gives a machine's own name 127.0.1.1: of no use to the others
        found.append((address, int(port)))
    if len(set(found)) < len(found):
        raise UsageError(f"--rdzv-endpoint {endpoint!r} names the same place twice")
    return tuple(found)


def outward(endpoints: tuple[tuple[str, int], ...]) -> str:
    """The address of this machine from which the endpoints, else other networks, are reached. Nothing is sent."""
    for host, port in (*endpoints, ("192.0.2.1", 9)):
        with suppress(OSError), socket.socket(family_of(host), socket.SOCK_DGRAM) as s:
            s.connect((host, port))
            return str(s.getsockname()[0])
    return "127.0.0.1"


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """The handler for plain torchrun, which knows nothing of hints and spares."""
    return Membership(parameters)


def creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point group `torchrun.handlers` wants: a function that returns the creator."""
    return create


@contextmanager
def registered(hint: int, spares: int | None, record: tuple[Path, int]) -> Iterator[list[Membership]]:
    """For the length of the block the backend makes handlers for goodrun's own launcher; those it has made are closed after it."""
    made: list[Membership] = []

    def make(parameters: RendezvousParameters) -> RendezvousHandler:
        made.append(Membership(parameters, hint=hint, spares=spares, record=record))
        return made[-1]

    registry = getattr(rendezvous_handler_registry, "_registry", {})
    registry.pop(BACKEND, None)  # torch refuses a second one of the same name, and the entry point's may be there
    rendezvous_handler_registry.register(BACKEND, make)
    try:
        yield made
    finally:
        for handler in made:
            handler.shutdown()


__all__ = ["BACKEND", "Membership", "Note", "Stand", "create", "creator", "registered"]
