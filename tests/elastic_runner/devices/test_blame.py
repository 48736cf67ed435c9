"""Who is to blame where a rank dies and its GPU is sick."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from goodrun.elastic_runner.attempt import Broken
from goodrun.elastic_runner.journal import Journal
from goodrun.elastic_runner.options import RunConfig
from goodrun.elastic_runner.policy import Budgets, Failure, Kind, Slots
from goodrun.elastic_runner.recorder import Recorder
from goodrun.elastic_runner.supervisor import Supervisor

FOUR = Slots(active=(0, 1, 2, 3))


def broken(kind, slot):
    failure = Failure(t=time.monotonic(), kind=kind, slot=slot, rank=slot, step=5)
    return Broken(failure=failure, cause=f"rank {slot}", fault_t=failure.t)


@pytest.mark.parametrize(
    ("verdict", "slots"),
    [
        pytest.param(broken(Kind.SLOT_LOST, 2), (0, 1, 3), id="its GPU is condemned"),
        pytest.param(broken(Kind.DEVICE, 2), (0, 1, 2, 3), id="its GPU only wants a new start"),
        pytest.param(None, (0, 1, 2, 3), id="its GPU is well"),
    ],
)
def test_a_rank_that_dies_of_its_gpu_is_not_to_blame(tmp_path, verdict, slots):
    """An exception together with a condemned GPU is the GPU's failure, and the restart is without it; else it is the script's."""
    journal = Journal(tmp_path)
    supervisor = Supervisor(
        config=RunConfig(slots=FOUR, budgets=Budgets()),
        journal=journal,
        signals=SimpleNamespace(),
        recorder=Recorder(journal, (), lambda text: None),
        say=lambda text: None,
        worker_env={},
        ward=SimpleNamespace(look=lambda attempt, slots: verdict, slow=lambda slot, for_s: "", well_t=lambda: None),
    )
    supervisor._broken(SimpleNamespace(pages=dict, ranks=[]), broken(Kind.EXCEPTION, 1))
    assert supervisor.pending is not None
    assert supervisor.pending.slots.active == slots
    journal.close()
