"""GPU memory that ranks have left behind is waited for before the next ones come, for so long, and who holds it is named."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from goodrun.elastic_runner.devices.answers import Report
from goodrun.elastic_runner.devices.asking import InUse, ProberProcess
from goodrun.elastic_runner.devices.freeing import Freeing
from goodrun.elastic_runner.devices.health_policy import load
from goodrun.elastic_runner.devices.identity import Bound
from goodrun.elastic_runner.devices.watch import DeviceWatch
from goodrun.elastic_runner.events import AttemptStarted, ChaosFired, WorkersSpawned


@pytest.fixture
def freeing(gpus, prober):
    """The waiting, by way of the real prober and nvidia-ml-py; and what it says."""
    said = []
    watch = DeviceWatch(load(), prober(), said.append)
    assert watch.devices(30)
    return Freeing(watch.memory, said.append), said


def bound(gpus, *devices):
    return [Bound(name=gpus.uuid(n), uuid=gpus.uuid(n), index=n) for n in devices]


def test_memory_that_goes_is_waited_for(gpus, freeing):
    """What others had in use at first is not waited for; what came since is, until it is given back."""
    made, said = freeing
    gpus.set(1, "memory_used", 30 << 30)
    made.wait(bound(gpus, 0, 1))
    gpus.set(0, "memory_used", 40 << 30, for_s=1.0)
    asked = []
    ask, made._ask = made._ask, lambda names, within_s: asked.append(ask(names, within_s)) or asked[-1]
    made.wait(bound(gpus, 0, 1), within_s=60)
    used = [held[gpus.uuid(0)].used for held in asked]
    assert used[0] == 40 << 30 and used[-1] == 512 << 20
    assert not any("still held" in words for words in said)


def test_who_holds_memory_for_good_is_named_and_not_waited_for_again(gpus, freeing):
    """Past the limit the process is named with its command line; at the next restart it costs nothing more."""
    made, said = freeing
    made.wait(bound(gpus, 2))
    gpus.set(2, "memory_used", 40 << 30)
    gpus.set(2, "memory_pid", os.getpid())
    made.wait(bound(gpus, 2), within_s=0.2)
    [words] = said
    assert words.startswith("GPU 2 (") and f"39.5 GiB of its memory are still held by pid {os.getpid()} (" in words and "python" in words
    made.wait(bound(gpus, 2), within_s=60)
    assert len(said) == 1


def test_a_driver_that_does_not_tell_is_not_waited_for(gpus, freeing):
    """No answer about memory, an error, or no prober at all: a restart goes on."""
    made, said = freeing
    gpus.set(0, "DeviceGetMemoryInfo.returns", 3)
    made.wait(bound(gpus, 0), within_s=60)
    gpus.set(0, "DeviceGetMemoryInfo.hangs", 1)
    made.wait(bound(gpus, 0), within_s=60)
    Freeing(lambda names, within_s: None, said.append).wait(bound(gpus, 0), within_s=60)
    assert said == []


def test_a_question_about_memory_is_answered_between_rounds(gpus, prober, hear):
    """Its answer does not wait for the next round of the prober."""
    p = prober(every_s=60.0)
    hear(p, lambda h: getattr(h, "device", "") == gpus.uuid(3))
    assert p.ask_memory([gpus.uuid(3)])
    assert hear(p, lambda h: isinstance(h, InUse), timeout=20)[-1].held[gpus.uuid(3)].used == 512 << 20


def test_a_restart_waits_for_the_memory_of_its_gpus(job, gpus8, quick_policy, tmp_path):
    """The memory of a killed rank's GPU is still in use: the next attempt begins when it is given back, with all slots."""
    env = {**gpus8.env({}), "GOODRUN_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": "4,5", "TEST_LAST": "1"}
    j = job("--nproc-per-node", 2, "--warm-start", "off", "--health-policy", quick_policy, "visible.py", env=env)
    j.until(lambda: len(j.marks("g0.l*")) == 2)
    gpus8.set(5, "memory_used", 40 << 30)
    os.kill(j.events(WorkersSpawned)[0].pids[1], signal.SIGKILL)
    j.until(lambda: "waiting for memory of GPU 5" in j.err)
    assert len(j.events(AttemptStarted)) == 1
    gpus8.set(5, "memory_used", 512 << 20)
    j.ok()
    first, second = j.events(AttemptStarted)
    assert first.slots == second.slots == (0, 1)
    assert "still held" not in j.err


def test_chaos_can_hold_memory(job):
    """The job is held up by it, and goes on."""
    chaos = "memory-held:slot=0,for=1s@step=6; kill:rank=0@step=7"
    j = job("--nproc-per-node", 2, "--simulate-gpus", 2, "--chaos", chaos, "train.py", 12, env={"TEST_PAUSE": "0.2"}).ok()
    assert [f.entry for f in j.events(ChaosFired)] == chaos.split("; ")
    assert len(j.events(AttemptStarted)) == 2


@pytest.mark.gpu
def test_a_real_gpu_tells_what_is_in_use(hear):
    """A gibibyte that this process takes is seen."""
    p = ProberProcess(1.0, 30.0, os.environ)
    p.start()
    try:
        uuid = hear(p, lambda h: isinstance(h, Report))[-1].device

        def used() -> int:
            assert p.ask_memory([uuid])
            return hear(p, lambda h: isinstance(h, InUse))[-1].held[uuid].used

        before = used()
        torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        assert used() - before >= 1 << 30
    finally:
        p.close()
