"""Whole runs whose (simulated) GPUs fall sick: set aside, gone on without, tested, let back in; and never more than that."""

from __future__ import annotations

import json
import time

import psutil
import pytest

from goodrun.elastic_runner.devices.health_policy import SHIPPED
from goodrun.elastic_runner.devices.ledger import Entry, Ledger
from goodrun.elastic_runner.ending import NODE_UNFIT
from goodrun.elastic_runner.events import (
    AttemptStarted,
    ChaosFired,
    Decided,
    DeviceSetAside,
    DeviceTested,
    DeviceVerdict,
    Failed,
    Notice,
    Restored,
    RunEnded,
)


@pytest.fixture
def sick_job(job, quick_policy):
    """A job of four slots on four simulated GPUs whose ranks wait until their attempt is the last one; with chaos."""

    def start(chaos, *options, last=1, nproc=4, policy=quick_policy, **kwargs):
        own = ("--simulate-gpus", 4) if "env" not in kwargs else ()
        env = {**kwargs.pop("env", {}), "TEST_LAST": str(last)}
        words = ["--warm-start", "off", "--health-policy", policy, *(("--chaos", chaos) if chaos else ()), *options]
        return job("--nproc-per-node", nproc, *own, *words, "visible.py", env=env, **kwargs)

    return start


def slots(j):
    return [a.slots for a in j.events(AttemptStarted)]


def seen(j, attempt):
    """What the ranks of an attempt saw, by local rank: the device that is theirs."""
    return [(j.where / f"g{attempt}.l{local}").read_text() for local in range(len(slots(j)[attempt]))]


def notices(j):
    return "\n".join(n.text for n in j.events(Notice))


def prober_of(j):
    """The job's prober process."""

    def found():
        children = [c for c in psutil.Process(j.proc.pid).children() if c.status() != psutil.STATUS_ZOMBIE]
        return next((c for c in children if "import prober" in " ".join(c.cmdline())), None)

    return j.until(found)


def test_a_gpu_falls_off_the_bus_and_comes_back(job, consumed_once):
    """4 slots lose GPU 2 at step 20, without any XID; 3 go on; it passes its test, and 4 go on from the next checkpoint.

    No sample is lost or repeated, and the record and the ledger tell the story.
    """
    chaos = "gpu-lost:slot=2,for=2s@step=20"
    j = job("--nproc-per-node", 4, "--simulate-gpus", 4, "--chaos", chaos, "train.py", 320, env={"TEST_PAUSE": "0.04"}).ok()
    assert [a.slots for a in j.events(AttemptStarted)] == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 2, 3)]
    (fired,), (failed,) = j.events(ChaosFired), j.events(Failed)
    assert fired.entry == chaos
    assert (failed.kind, failed.slot) == ("slot-lost", 2)
    assert "GPU 2 (GPU-00000002-" in failed.cause and "no longer finds it" in failed.cause
    verdict = j.events(DeviceVerdict)[0]
    assert (verdict.condition, verdict.verdict, verdict.index) == ("gone", "SHED", 2)
    assert j.events(DeviceSetAside)[0].slot == 2
    assert [t.passed for t in j.events(DeviceTested)][-1]
    assert [d.action for d in j.events(Decided)] == ["restart without", "grow"]
    restored = j.events(Restored)[-1]
    assert restored.attempt == 2 and restored.step > 20
    consumed_once(j.where, 320)
    (entry,) = json.loads((j.run_dir / "gpus" / "quarantine.json").read_text())["devices"]
    assert entry["out"] is False and entry["offences"] >= 1 and entry["by"].startswith("run ")


def test_heat_is_told_memory_errors_shed_and_a_failed_remap_sheds_for_good(job, consumed_once):
    """A throttled GPU stays. One with an uncorrectable memory error goes, and what was saved since it was last seen well is not restored.

    One whose memory cannot be remapped goes and is never tested again. No sample is lost or repeated over all that. One checkpoint is kept.
    """
    chaos = "throttle:slot=0@step=8; ecc:slot=1@step=20; remap-failure:slot=2@step=40"
    j = job("--nproc-per-node", 4, "--simulate-gpus", 4, "--chaos", chaos, "train.py", 64, "one", env={"TEST_PAUSE": "0.2"}).ok()
    assert len(j.events(ChaosFired)) == 3
    verdicts = {v.condition: (v.index, v.verdict) for v in j.events(DeviceVerdict)}
    assert verdicts["hw-slowdown"] == (0, "LOG")
    assert verdicts["ecc-uncorrected"] == (1, "SHED")
    assert verdicts["remap-failure"] == (2, "PERM")
    assert [f.slot for f in j.events(Failed)] == [1, 2]
    assert "slows its clocks" in j.err and "nothing is done" in j.err
    (restored,) = [e for e in j.events(Restored) if e.attempt == 1]
    assert 5 <= restored.step <= 20  # the step of the error: it trained on for a while before anybody asked
    assert "is not trusted: GPU 1" in j.err
    aside = {a.slot: a.until for a in j.events(DeviceSetAside)}
    assert aside[1] and not aside[2]
    assert 2 not in slots(j)[-1]
    consumed_once(j.where, 64)


@pytest.mark.parametrize("form", ["numbers", "uuids"])
def test_a_list_that_is_not_from_0_on_is_respected(sick_job, gpus8, form, tmp_path):
    """C34: GPUs 4 to 7 of eight, 5 falls off the bus: the three ranks left each see a good one of the list, and history names GPU 5."""
    visible = ",".join(str(n) if form == "numbers" else gpus8.uuid(n) for n in (4, 5, 6, 7))
    env = {**gpus8.env({}), "CUDA_VISIBLE_DEVICES": visible, "GOODRUN_HOME": str(tmp_path / "home")}
    j = sick_job("", env=env)
    j.until(lambda: len(j.marks("g0.l*")) == 4)
    gpus8.set(5, "gone", 1)
    j.ok()
    assert slots(j) == [(0, 1, 2, 3), (0, 2, 3)]
    words = visible.split(",")
    assert seen(j, 0) == words
    assert seen(j, 1) == [words[0], words[2], words[3]]
    assert f"GPU 5 ({gpus8.uuid(5)})" in j.events(Failed)[0].cause


def test_an_applications_xids_restart_and_shed_nothing(sick_job):
    """A page fault and its like, on three GPUs: the same slots start again, once, and nothing is set aside."""
    chaos = [f"xid:slot={slot},code={code}@500ms" for slot, code in enumerate((31, 13, 43))]
    j = sick_job("; ".join(chaos)).ok()
    assert slots(j) == [(0, 1, 2, 3)] * 2
    assert [v.verdict for v in j.events(DeviceVerdict)] == ["RESTART"] * 3
    assert not j.events(DeviceSetAside)


def test_xids_of_broken_gpus_shed_them(sick_job):
    """Off the bus and memory that cannot be trusted, on two GPUs at once: both are set aside, the others go on."""
    j = sick_job("xid:slot=1,code=79@500ms; xid:slot=2,code=48@500ms", last=2).ok()
    assert slots(j) == [(0, 1, 2, 3), (0, 2, 3), (0, 3)]
    assert {v.condition for v in j.events(DeviceVerdict)} == {"XID 79", "XID 48"}


def test_a_wedged_gpu_is_sick_and_an_old_one_is_not(sick_job, gpus8, tmp_path):
    """C36: a GPU whose every answer is 'unknown error' is shed, the text in the record; one without ECC is neither sick nor shed."""
    gpus8.set(2, "DeviceGetTotalEccErrors.returns", 3)
    j = sick_job("probe-error:slot=1@500ms", env={**gpus8.env({}), "GOODRUN_HOME": str(tmp_path / "home")}).ok()
    assert slots(j) == [(0, 1, 2, 3), (0, 2, 3)]
    verdicts = j.events(DeviceVerdict)
    assert {v.index for v in verdicts} == {1}
    assert any("Unknown Error" in v.evidence for v in verdicts)


def test_a_gpu_that_is_lost_is_noticed_within_fifteen_seconds(sick_job, gpus8, tmp_path):
    """C38: one of four falls off the bus without any XID, so that the driver's numbers shift; its rank says nothing. Shipped policy."""
    env = {**gpus8.env({}), "GOODRUN_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    j = sick_job("", env=env, policy=SHIPPED)
    j.until(lambda: len(j.marks("g0.l*")) == 4)
    lost_t = time.monotonic()
    gpus8.set(4, "gone", 1)
    j.ok()
    (failed,) = j.events(Failed)
    assert (failed.kind, failed.slot) == ("slot-lost", 0)
    assert failed.t - lost_t < 15
    assert slots(j) == [(0, 1, 2, 3), (1, 2, 3)]


def test_a_driver_that_hangs_for_one_gpu_costs_that_gpu_alone(sick_job, quick_policy):
    """Questions about GPU 0 never return: twice past the deadline it is shed, said each time, and the others go on."""
    quick_policy.write_text(quick_policy.read_text().replace("deadline: 10s", "deadline: 1s"))
    j = sick_job("probe-hang:slot=0@500ms").ok()
    assert slots(j) == [(0, 1, 2, 3), (1, 2, 3)]
    assert "does not answer" in notices(j)


def test_chaos_kills_the_prober_and_hits_a_gpu_after_that(job):
    """prober-kill by the plan: the ranks train on, the record says so, and the GPU that fails next is found by the next prober."""
    chaos = "prober-kill@step=5; gpu-lost:slot=2,for=2s@step=8"
    j = job("--nproc-per-node", 3, "--simulate-gpus", 3, "--chaos", chaos, "train.py", 60, env={"TEST_PAUSE": "0.1"}).ok()
    assert [f.entry for f in j.events(ChaosFired)] == chaos.split("; ")
    assert "the prober was killed by signal 9" in notices(j)
    assert [(f.kind, f.slot) for f in j.events(Failed)] == [("slot-lost", 2)]


def test_a_killed_prober_is_said_and_the_run_goes_on(sick_job):
    """Whoever kills the prober: the ranks do not notice, the record says so, and the next prober still finds a lost GPU."""
    j = sick_job("gpu-lost:slot=3@6s")
    j.until(lambda: j.marks("g0.l*") == [f"g0.l{n}" for n in range(4)])
    prober_of(j).kill()
    j.ok()
    assert "killed by signal 9" in notices(j)
    assert slots(j) == [(0, 1, 2, 3), (0, 1, 2)]


def test_a_node_that_must_reboot_ends_the_job_with_a_status_of_its_own(sick_job):
    """The driver wants the node rebooted: the job ends, and its status tells a scheduler that here it need not be tried again."""
    j = sick_job("recovery:slot=0,code=2@500ms")
    assert j.wait() == NODE_UNFIT
    assert "node reboot" in j.err
    assert j.events(RunEnded)[0].status == NODE_UNFIT


def test_the_next_run_on_the_node_begins_without_a_gpu_that_was_set_aside(sick_job, gpus8, tmp_path):
    """What one job has found out the next one knows: its first attempt leaves the GPU out, and says why."""
    env = {**gpus8.env({}), "GOODRUN_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    policy = tmp_path / "slow.yaml"
    policy.write_text((tmp_path / "quick.yaml").read_text().replace("term: 1s", "term: 1h"))
    sick_job("gpu-lost:slot=2,for=1s@500ms", env=env, policy=policy, name="first").ok()
    j = sick_job("", env=env, last=0, policy=policy, name="second").ok()
    assert slots(j) == [(0, 1, 3)]
    assert "is set aside on this node" in j.err
    refused = sick_job("", "--min-nproc", 4, env=env, last=0, policy=policy, name="third")
    assert refused.wait() == NODE_UNFIT
    assert "3 of 4 slots are left" in refused.err
    assert refused.events(RunEnded)[0].status == NODE_UNFIT


def test_a_job_that_finds_too_few_devices_waits_for_them(sick_job, gpus8, tmp_path):
    """All are set aside as it is launched: it says so, waits, and begins when a person has let in enough; these are watched again."""
    env = {**gpus8.env({}), "GOODRUN_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    ledger = Ledger.of_node(env)
    for n in range(4):
        ledger.change(gpus8.uuid(n), lambda e, n=n: Entry(device=gpus8.uuid(n), reason="smells", by="ann"))
    j = sick_job("xid:slot=3,code=31@500ms", "--min-nproc", 2, "--wait-for-devices", "90s", env=env)
    j.until(lambda: "0 of 4 slots are left" in j.err)
    for n in (1, 3):
        ledger.release(gpus8.uuid(n), 0.0, "ben")
    j.ok()
    assert slots(j) == [(1, 3)] * 2
    assert seen(j, 0) == ["1", "3"]
    assert [v.condition for v in j.events(DeviceVerdict)] == ["XID 31"]


@pytest.mark.parametrize("comes", [True, False])
def test_a_job_that_must_not_shrink_waits_for_its_device(sick_job, comes):
    """With --wait-for-devices the job stands still until the GPU has passed its test; if none comes back in time it ends with status 69."""
    chaos = "gpu-lost:slot=1,for=1s@500ms" if comes else "remap-failure:slot=1@500ms"
    j = sick_job(chaos, "--min-nproc", 4, "--wait-for-devices", "90s" if comes else "1s")
    assert j.wait(100) == (0 if comes else NODE_UNFIT)
    assert slots(j) == [(0, 1, 2, 3)] * (2 if comes else 1)
    actions = [d.action for d in j.events(Decided)]
    assert actions == ["wait"] if comes else actions == ["wait", "give up"]
    assert "waiting for a device" in j.err


@pytest.mark.parametrize("how", ["damaged", "unwritable"])
def test_a_bad_ledger_stops_no_run(sick_job, gpus8, tmp_path, how):
    """A ledger that is damaged, or cannot be written: the run sheds the sick GPU all the same, goes on, and says so."""
    home = tmp_path / "home"
    ledger = Ledger.of_node({"GOODRUN_HOME": str(home)})
    ledger.path.parent.mkdir(parents=True)
    if how == "damaged":
        ledger.path.write_text("{")
    else:
        ledger.path.with_suffix(".lock").mkdir()
    j = sick_job("xid:slot=1,code=79@500ms", env={**gpus8.env({}), "GOODRUN_HOME": str(home)}).ok()
    assert slots(j) == [(0, 1, 2, 3), (0, 2, 3)]
    assert "quarantine ledger" in j.err


def test_a_gpu_that_a_person_sets_aside_leaves_the_running_job(sick_job, gpus8, tmp_path):
    """`goodrun devices quarantine` works on a job that runs: it goes on without that GPU."""
    env = {**gpus8.env({}), "GOODRUN_HOME": str(tmp_path / "home")}
    j = sick_job("", env=env)
    j.until(lambda: len(j.marks("g0.l*")) == 4)
    Ledger.of_node(env).change(gpus8.uuid(3), lambda e: Entry(device=gpus8.uuid(3), reason="smells", by="ann"))
    j.ok()
    assert slots(j) == [(0, 1, 2, 3), (0, 1, 2)]
    assert "smells (set aside by ann)" in j.events(Failed)[0].cause
