"""goodrun inside torch's agent: a fresh store per attempt, our watch instead of its poll, our answer instead of its counter."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from .nodes.handler import Membership, Stand
from .nodes.messages import Leave
from .policy import Do, Kind
from .supervisor import STARTED_VARIABLE, Outcome, Supervisor
from .workers import WorkerContext


class GoodAgent(LocalElasticAgent):
    """torch's agent with its decisions taken over; a subclass made by `bound_to` carries the supervisor."""

    supervisor: Supervisor

    def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(spec, *args, **kwargs)
        self._poll_s = spec.monitor_interval
        spec.monitor_interval = 0.0  # torch sleeps this long before it asks; we wait for events while it asks
        self._worker_store: TCPStore | None = None
        self._round = 0
        self._membership = spec.rdzv_handler if isinstance(spec.rdzv_handler, Membership) else None
        if self._membership is not None:
            self.supervisor.news = self._membership.news
            self.supervisor.trust.heard = self._membership.replicas

    def _rendezvous(self, worker_group: Any) -> None:  # torch's own annotations of its fields are not true
        sup, begin = self.supervisor, time.monotonic()
        worker_group.spec.local_world_size = len(sup.slots.active)
        with sup.signals.waiting("the other nodes"):
            if self._membership is not None:
                generation, host, port = self._agreed(self._membership, worker_group)
            else:
                with _unshared_store():
                    super()._rendezvous(worker_group)
                self._round += 1
                generation, host, port = self._fresh_store(worker_group)
        worker_group.master_addr, worker_group.master_port = host, port
        first = worker_group.workers[0]
        sup.attempt_begins(generation, first.world_size, first.global_rank, time.monotonic() - begin)

    def _agreed(self, membership: Membership, group: Any) -> tuple[int, str, int]:
        """(generation, host, port) of the round that the nodes have agreed on; its store is new."""
        sup = self.supervisor
        started, copies = int(sup.worker_env[STARTED_VARIABLE]), sup.config.snapshot_replicas
        keeper = sup.keeper if copies else None
        membership.stand = Stand(
            next=sup.generation + 1,
            started=started,
            size=group.spec.local_world_size,
            role=group.spec.role,
            distrusted=sup.trust.told,
            turn=sup.trust.turns,
            keeper=0 if keeper is None else keeper.open_at(membership.address),
            copies=copies,
        )
        super()._rendezvous(group)
        formed = membership.formed
        assert formed is not None
        if keeper is not None:
            keeper.sends_to(formed.keepers, membership.keepers_key)
        sup.worker_env[STARTED_VARIABLE] = str(formed.started)
        sup.trust.agreed(formed.distrusted)
        sup.recorder.round_formed(formed, membership.clock_behind_s)
        return formed.round.generation, formed.place.address, formed.place.port

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> list[Worker]:
        formed = self._membership.formed if self._membership is not None else None
        if formed is None:
            theirs: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
            return theirs
        place = formed.place  # the leader has counted: nothing to ask a store for
        return [
            Worker(
                local_rank=i,
                global_rank=place.base_rank + i,
                role_rank=place.base_role_rank + i,
                world_size=place.world_size,
                role_world_size=place.role_world_size,
            )
            for i in range(spec.local_world_size)
        ]

    def _fresh_store(self, group: Any) -> tuple[int, str, int]:
        """(generation, host, port) of a store that no earlier attempt has written to, agreed on by all agents of the round.

        torchrun hands out one store for ever, and restarted ranks read the addresses of dead ones from it.
        """
        mine = self.supervisor.generation + 1
        if group.group_world_size == 1:
            host, port = self._new_store(group)
            return mine, host, port
        store, rank = group.store, group.group_rank or 0
        # the static rendezvous keeps one key space over all rounds
        prefix = f"goodrun/{self._round}/" if group.spec.rdzv_handler.get_backend() == "static" else "goodrun/"
        env = self.supervisor.worker_env
        store.set(f"{prefix}next/{rank}", json.dumps([mine, int(env[STARTED_VARIABLE])]))
        if rank == 0:
            all_next = [json.loads(store.get(f"{prefix}next/{r}")) for r in range(group.group_world_size)]
            host, port = self._new_store(group)
            # the newest of all: a checkpoint's fence compares (start, generation), and no node may fall behind the others
            store.set(f"{prefix}store", json.dumps([max(g for g, _ in all_next), max(s for _, s in all_next), host, port]))
        generation, started, host, port = json.loads(store.get(f"{prefix}store"))
        env[STARTED_VARIABLE] = str(started)
        return int(generation), str(host), int(port)

    def _new_store(self, group: Any) -> tuple[str, int]:
        config = self.supervisor.config
        host = config.local_addr or group.spec.master_addr or ("127.0.0.1" if config.max_nodes == 1 else socket.getfqdn())
        self._worker_store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._worker_store.port

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        sup = self.supervisor
        until = time.monotonic() + self._poll_s if sup.config.max_nodes > 1 else None
        outcome = sup.watch(until)
        ranks = [w.global_rank for w in worker_group.workers]
        if self._membership is not None:
            self._membership.saved(sup.durable_step)
            if outcome is Outcome.GIVE_UP:
                self._membership.leave = self._farewell()
        if outcome is Outcome.HEALTHY:
            return RunResult(state=WorkerState.HEALTHY)
        if outcome is Outcome.SUCCEEDED:
            sup.end()
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        # torch restarts while its counter is above zero, and takes one off
        self._remaining_restarts = 0 if outcome is Outcome.GIVE_UP else max(self._remaining_restarts, 1)
        return RunResult(state=WorkerState.FAILED, failures=self._failures())

    def _farewell(self) -> Leave:
        """What the other nodes are told: where this node is to blame, they go on without it; where the script is, nobody need."""
        broken = self.supervisor.last_failure
        here = broken is not None and broken.failure.kind in (Kind.NODE_SICK, Kind.SLOT_LOST, Kind.SIGNAL, Kind.HANG, Kind.DEVICE)
        return Leave(broken.cause if broken is not None else "it gave up", closes=not here)

    def _failures(self) -> dict[int, ProcessFailure]:
        """torch's own record of the failure that counts, for its callers and its error report."""
        broken = self.supervisor.last_failure
        attempt, pending = self.supervisor.attempt, self.supervisor.pending
        if broken is None or attempt is None or (pending is not None and pending.do is Do.GROW):
            return {}
        r = next(r for r in attempt.ranks if r.rank == broken.failure.rank)
        code = r.code if r.code else -9 if broken.evidence else 1
        return {r.rank: ProcessFailure(local_rank=r.local, pid=r.pid, exitcode=code, error_file=r.error_file)}

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.supervisor.pending is None:  # torch restarts by itself only for nodes that wait to join
            self.supervisor.membership_changed()
        self.supervisor.begin_restart()
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self.supervisor.end()
        super()._stop_workers(worker_group, *args, **kwargs)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.supervisor.end()
        super()._shutdown(*args, **kwargs)

    def _exit_barrier(self) -> None:
        group: Any = self._worker_group
        if self._membership is not None:
            with self.supervisor.signals.waiting("the other nodes to finish"):
                self._membership.finish()
        elif group.group_world_size != 1:
            with self.supervisor.signals.waiting("the other nodes to finish"):
                super()._exit_barrier()  # type: ignore[no-untyped-call]


@contextmanager
def _unshared_store() -> Iterator[None]:
    """Keep torch from serving the ranks' store on the agents' own, whose address it would go on giving out when that node is gone."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def bound_to(supervisor: Supervisor) -> type[GoodAgent]:
    """A GoodAgent class whose agents report to `supervisor`: torch's launcher instantiates the class itself."""
    return type("GoodAgent", (GoodAgent,), {"supervisor": supervisor})


def start_processes_for(supervisor: Supervisor) -> Any:
    """What stands in for torch's `start_processes`: the same arguments, our context."""

    def start_processes(**kwargs: Any) -> WorkerContext:
        kwargs.pop("start_method", None)  # only for functions as entry points, which the command line never has
        env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # rank 0 must not try to serve the store: we do
        spawn = supervisor.spawn_plan()
        for rank_env in kwargs["envs"].values():
            rank_env.update(env)
        context = WorkerContext(spawn=spawn, **kwargs)
        try:
            with supervisor.signals.waiting("the ranks' imports"):
                context.warm_up()
            context.start()
        except BaseException:
            context.end()
            raise
        supervisor.workers_started(context)
        return context

    return start_processes
