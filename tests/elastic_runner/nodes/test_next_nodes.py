"""To which nodes' keepers each node's sends copies of its snapshots."""

import pytest

from goodrun.elastic_runner.nodes.leader import next_keepers
from goodrun.elastic_runner.nodes.messages import Hello, Ready
from goodrun.elastic_runner.nodes.roster import Peer
from goodrun.elastic_runner.nodes.rounds import Known


def peer(name, keeper, copies):
    ready = Ready(0, 1, f"10.0.0.{name}", 1, 1, "", 0, keeper=keeper, copies=copies)
    return Peer(hello=Hello(name, name, -1, Known()), heard_t=0.0, ready=ready)


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([("1", 7, 1), ("2", 7, 1), ("3", 7, 1)], {"1": "2", "2": "3", "3": "1"}),
        ([("1", 7, 2), ("2", 7, 2), ("3", 7, 2)], {"1": "23", "2": "31", "3": "12"}),
        ([("1", 7, 5), ("2", 7, 5)], {"1": "2", "2": "1"}),
        ([("1", 7, 1)], {"1": ""}),
        ([("1", 7, 1), ("2", 0, 0), ("3", 7, 1)], {"1": "3", "2": "", "3": "1"}),
        ([("1", 0, 0), ("2", 0, 0)], {"1": "", "2": ""}),
    ],
)
def test_the_next_ones_in_a_ring(nodes, found):
    """As many as there are, never itself, and none that takes nothing."""
    keepers = next_keepers([peer(*n) for n in nodes])
    assert keepers == {n: tuple(f"10.0.0.{k} 7" for k in after) for n, after in found.items()}
