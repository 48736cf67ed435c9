"""Each kind of fault that a rank can meet, in a whole run: noticed, named, and the job ends with the right result."""

from __future__ import annotations

import pytest

from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.manifest import first_fault
from goodrun.elastic_runner.events import AttemptStarted, ChaosFired, Decided, Failed, Notice, Restored, RunEnded, StackDumped


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


def test_a_bad_network_for_a_while_is_survived(job):
    """What is lost is sent again; a partition that ends is waited for, or found like a hang where steps are much shorter than it."""
    plan = "net-loss:rank=1,percent=20,for=2s@step=5; net-partition:rank=0,for=1s@step=8; net-slow:rank=1,kib=32,for=2s@step=12"
    plan += "; net-delay:rank=0,ms=80,for=1s@step=16"
    j = job("--nproc-per-node", 2, "--chaos", plan, "train.py", 30, env={"TEST_PAUSE": "0.1"}).ok()
    assert len(j.events(ChaosFired)) == 4
    assert {f.kind for f in j.events(Failed)} <= {"hang"}
    assert j.events(RunEnded)[0].step == 30


def test_a_partition_for_good_is_found_like_a_hang(job):
    """No connection breaks and no rank dies: that nothing moves is what is seen, and the ranks of the next attempt hear each other."""
    j = job("--nproc-per-node", 2, "--chaos", "net-partition:rank=1@step=12", "train.py", 20).ok()
    assert [f.kind for f in j.events(Failed)] == ["hang"]
    assert j.events(RunEnded)[0].step == 20


def fired(j):
    return [f.entry for f in j.events(ChaosFired)]


def whole(j):
    """The steps of the checkpoints that are whole to the last byte, and of those that are complete but damaged."""
    found = [f for f in found_in(j.where / "checkpoints") if f.manifest is not None]
    good = {f.step for f in found if first_fault(f.path, f.manifest.files.items()) is None}
    return good, {f.step for f in found} - good


def test_what_befalls_the_processes_beside_the_ranks_and_their_storage_stops_no_training(job):
    """Keeper and nursery are killed, the store's connection is cut, storage fails three times and is slow, the clock goes back: no restart.

    A rank that is killed after all that starts again as ever, and the last checkpoint is whole.
    """
    plan = [
        "keeper-kill@step=6",
        "store-cut:rank=1@step=7",
        "clock-jump:by=-2h@step=8",
        "enospc@step=10",
        "eio@step=15",
        "read-only@step=20",
        "slow-storage:ms=5@step=25",
        "nursery-kill@step=27",
        "kill:rank=1@step=34",
    ]
    j = job("--nproc-per-node", 2, "--chaos", "; ".join(plan), "train.py", 40).ok()
    assert sorted(fired(j)) == sorted(plan)
    assert [f.kind for f in j.events(Failed)] == ["signal"]
    assert "the keeper of the checkpoints has died" in "\n".join(n.text for n in j.events(Notice))
    for why in ("No space left on device", "Input/output error", "Read-only file system"):
        assert f"{why}" in j.err
    assert 40 in whole(j)[0]
    walls = [e.wall for e in j.events()]
    assert walls != sorted(walls)  # the record's stamps went back with the clock


def test_moments_in_a_start_a_save_and_a_restore(job):
    """A rank dies in the first save from step 8 on; one in the restore after it; one raises in the start after that; then peers are cut."""
    plan = [
        "kill:rank=1@phase=save,step=8",
        "segv:rank=0@phase=restore,attempt=1",
        "raise:rank=1@phase=start,attempt=2",
        "peers-cut:rank=1@step=13,attempt=3",
        "deadlock:rank=0@step=18,attempt=4",
    ]
    j = job("--nproc-per-node", 2, "--chaos", "; ".join(plan), "train.py", 25).ok()
    assert fired(j) == plan
    failed = j.events(Failed)
    assert [f.kind for f in failed] == ["signal", "signal", "exception", "connection", "hang"]
    assert [f.rank for f in failed[:3]] == [1, 0, 1]
    assert [f.step for f in failed[:3]] == [10, -1, -1]
    assert {r.step for r in j.events(Restored)} == {5, 10, 15}


def test_a_new_launcher_goes_on_past_damaged_checkpoints_and_repeats_no_fault(job):
    """Two checkpoints are damaged behind the keeper's back and goodrun is killed: the next one restores the newest that is whole.

    What has fired in the first life does not fire again.
    """
    plan = "bit-flip@step=15; torn-write@step=15; removed-file@step=20; supervisor-kill@step=23"
    first = job("--nproc-per-node", 2, "--chaos", plan, "train.py", 40, env={"TEST_PAUSE": "0.1"})
    assert first.wait() == -9
    second = job("--nproc-per-node", 2, "--chaos", plan, "train.py", 40).ok()
    assert fired(second) == plan.split("; ")
    for step in (15, 20):
        assert f"checkpoint step-{step:010d}." in second.err
    assert [r.step for r in second.events(Restored)] == [10]
    assert 40 in whole(second)[0]


@pytest.mark.parametrize("grace", ["30s", "300ms"])
def test_a_preempted_job_saves_and_goes(job, grace):
    """With the time that it is given, all ranks save the same step and leave; without, the launcher is killed, and nothing lives on."""
    j = job("--nproc-per-node", 2, "--chaos", f"preempt:grace={grace}@step=7", "train.py", 4000, env={"TEST_PAUSE": "0.1"})
    if grace == "30s":
        assert j.wait() == 143
        assert "was saved on the way out" in j.err
    else:
        assert j.wait() in (-9, 143)  # it may have been quicker
    assert not any(d.action == "restart" for d in j.events(Decided))


def test_a_killed_worker_of_a_loader_costs_a_restart(job, tmp_path):
    """The rank whose loader lost a worker gets an exception, wherever it is, and that exception is on record."""
    env = {"TMPDIR": str(tmp_path)}  # a rank that is ended leaves multiprocessing's folder behind, as under torchrun
    j = job("--nproc-per-node", 2, "--chaos", "loader-kill:rank=1@step=12", "train.py", 20, "workers", env=env).ok()
    (failed,) = j.events(Failed)
    assert (failed.kind, failed.rank) == ("exception", 1)
    assert failed.message


@pytest.mark.exhaustive
def test_a_loader_that_stands_still_is_found(job, tmp_path):
    """C41: a loader's worker that is stopped is no storage with a bad minute: the rank that waits for it is restarted, its stack kept."""
    env = {"TMPDIR": str(tmp_path)}
    j = job("--nproc-per-node", 2, "--chaos", "loader-stall:rank=1@step=12", "train.py", 20, "workers", env=env).ok(110)
    (failed,) = j.events(Failed)
    assert (failed.kind, failed.rank) == ("hang", 1)
    [stack] = [s.stack for s in j.events(StackDumped) if s.rank == 1]
    assert any("dataloader.py" in line for line in stack)
    assert len(j.events(AttemptStarted)) == 2
