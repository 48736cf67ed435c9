"""Each kind of fault that a rank can meet, in a whole run: noticed, named, and the job ends with the right result."""

from __future__ import annotations

import pytest

from goodrun.elastic_runner.events import ChaosFired, Failed, RunEnded


@pytest.mark.parametrize(
    ("entry", "kind", "cause"),
    [
        ("segv:rank=1@step=12", "signal", "killed by SIGSEGV"),
        ("abort:rank=1@step=12", "signal", "killed by SIGABRT"),
        ("oom:rank=1@step=12", "exception", "MemoryError"),
        ("stall:rank=1@step=12", "hang", "rank 1 hangs"),
        ("gil:rank=1@step=12", "hang", "rank 1 hangs"),
    ],
)
def test_every_fault_of_a_rank_is_noticed_and_survived(job, entry, kind, cause):
    """The record names the rank and what befell it, and the script makes all of its steps."""
    j = job("--nproc-per-node", 2, "--chaos", entry, "train.py", 20).ok()
    (failed,) = j.events(Failed)
    assert (failed.kind, failed.rank) == (kind, 1)
    assert cause in failed.cause
    assert [f.entry for f in j.events(ChaosFired)] == [entry]
    assert j.events(RunEnded)[0].step == 20


def test_a_slow_rank_is_no_failure(job):
    """A rank that takes four times as long is waited for: the job ends as it would have, without a restart."""
    j = job("--nproc-per-node", 2, "--chaos", "slow:rank=1,factor=4@step=5", "train.py", 20).ok()
    assert not j.events(Failed)
    assert len(j.events(ChaosFired)) == 1
