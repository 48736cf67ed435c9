"""The rendezvous of a job on one node: nobody to wait for, so nothing waits.

torch's own for this case (c10d on a free port) delays its first rounds by up to 0.3 s, to spread agents that are not there, and takes a
twentieth of a second for each later one.
"""

from __future__ import annotations

import argparse
import uuid

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "goodrun-alone"


class Alone(RendezvousHandler):
    """A group of one agent."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._address = parameters.local_addr or "127.0.0.1"

    def get_backend(self) -> str:
        """The name under which it is registered."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Rank 0 of 1, at once. The ranks' own store is made by the agent; the port here is never used."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self._address, 0))

    def is_closed(self) -> bool:
        """Never: there is nobody who could close it."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell anybody."""

    def num_nodes_waiting(self) -> int:
        """None."""
        return 0

    def get_run_id(self) -> str:
        """The run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to shut."""
        return True


def instead_of_meeting(args: argparse.Namespace, max_nodes: int) -> None:
    """Choose this backend where torchrun would meet itself: `--standalone`, or one node and no word on where to meet."""
    if args.standalone or (max_nodes == 1 and args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None):
        rendezvous_handler_registry.register(BACKEND, Alone)
        args.standalone, args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = False, BACKEND, "localhost:0", str(uuid.uuid4())
