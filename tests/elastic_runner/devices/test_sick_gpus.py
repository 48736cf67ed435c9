"""Whole runs whose (simulated) GPUs fall sick: set aside, gone on without, tested, let back in; and never more than that."""

from __future__ import annotations

import json

from goodrun.elastic_runner.events import AttemptStarted, ChaosFired, Decided, DeviceSetAside, DeviceTested, DeviceVerdict, Failed, Restored


def test_a_gpu_falls_off_the_bus_and_comes_back(job, quick_policy, consumed_once):
    """4 slots lose GPU 2 at step 20, without any XID; 3 go on; it passes its test, and 4 go on from the next checkpoint.

    No sample is lost or repeated, and the record and the ledger tell the story.
    """
    chaos = "gpu-lost:slot=2,for=2s@step=20"
    options = ("--simulate-gpus", 4, "--health-policy", quick_policy, "--chaos", chaos)
    j = job("--nproc-per-node", 4, *options, "train.py", 400, env={"TEST_PAUSE": "0.04"}).ok()
    assert [a.slots for a in j.events(AttemptStarted)] == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 2, 3)]
    (fired,), (failed,) = j.events(ChaosFired), j.events(Failed)
    assert fired.entry == chaos
    assert (failed.kind, failed.slot) == ("slot-lost", 2)
    assert "GPU 2 (GPU-00000002-" in failed.cause and "gone" in failed.cause
    verdict = j.events(DeviceVerdict)[0]
    assert (verdict.condition, verdict.verdict, verdict.index) == ("gone", "SHED", 2)
    assert j.events(DeviceSetAside)[0].slot == 2
    assert [t.passed for t in j.events(DeviceTested)][-1]
    assert [d.action for d in j.events(Decided)] == ["restart without", "grow"]
    restored = j.events(Restored)[-1]
    assert restored.attempt == 2 and restored.step > 20
    consumed_once(j.where, 400)
    (entry,) = json.loads((j.run_dir / "gpus" / "quarantine.json").read_text())["devices"]
    assert entry["out"] is False and entry["offences"] >= 1 and "gone" in entry["reason"] + entry["evidence"]
