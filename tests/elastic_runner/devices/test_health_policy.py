"""The health policy's promises: the table of NVIDIA's codes is what we say it is, and a mistake in the file is named."""

from __future__ import annotations

import os
import time

import pytest
import yaml

from goodrun.elastic_runner.devices.asking import ProberProcess
from goodrun.elastic_runner.devices.findings import Finding, xid_finding
from goodrun.elastic_runner.devices.health_policy import SHIPPED, Do, PolicyError, judge, load
from goodrun.elastic_runner.devices.watch import DeviceWatch
from goodrun.fault_injection.simulated_gpus import SimulatedGpus

LOG, RESTART, SHED, DRAIN, PERM = Do
XIDS = {
    RESTART: [8, 11, 25, 32, 80, 13, 31, 39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136), 43, 60, 68, 69, 82, 83, 84, 86, 88, 89,
              *range(96, 106), 139, 94],
    SHED: [46, 48, 61, 62, 64, 74, 79, 95, 109, 110, 119, 120, 122, 123, 124, 125, 136, 140, 143, *range(144, 151), 155, 156, 158, 167],
    DRAIN: [54, 151, 173],
    LOG: [37, 38, 66, 67, 44, 45, 63, 78, 92, 93, 121, 137, 141, 152, 153, 160, 161, 154, 157, 162, 163, 164, 165, 999],
}  # fmt: skip
TABLE = {code: do for do, codes in XIDS.items() for code in codes}


@pytest.fixture
def edited(tmp_path):
    """The shipped policy with a change, as a file."""

    def write(change):
        body = yaml.safe_load(SHIPPED.read_text())
        change(body)
        path = tmp_path / "policy.yaml"
        path.write_text(yaml.safe_dump(body))
        return path

    return write


def verdict_of(*found, times=None, **kwargs):
    times = times or range(len(found))
    return judge(load(), list(zip(map(float, times), found, strict=True)), **kwargs)


def test_every_xid_of_the_policy_end_to_end(tmp_path):
    """Each XID, told by NVIDIA's (simulated) library and read by the real prober, ends in the table's action; no other is listed."""
    policy = load()
    assert policy.xids.keys() == TABLE.keys() - {999}
    gpus = SimulatedGpus.create(tmp_path / "gpus", len(TABLE))
    seen = watched(gpus, policy, lambda: [gpus.xid(n, code) for n, code in enumerate(TABLE)], len(TABLE))
    assert {v.finding.xid: v.do for v in seen} == TABLE
    assert [v.finding.device for v in seen] == [gpus.uuid(n) for n in range(len(TABLE))]


def test_the_drivers_own_recovery_action_wins_over_the_table(tmp_path):
    """Field 230: a reset wanted sheds even for an application's XID; nothing wanted keeps a GPU that the table would shed."""
    policy = load()
    gpus = SimulatedGpus.create(tmp_path / "gpus", 4)
    gpus.set(1, "field.230", 0)

    def happen():
        gpus.set(0, "field.230", 1)
        gpus.xid(0, 31)
        gpus.xid(1, 48)
        gpus.xid(2, 48)
        gpus.set(3, "field.230", 2)

    seen = watched(gpus, policy, happen, 4, every_s=0.3)
    by_device = {v.finding.device: v for v in seen}
    assert by_device[gpus.uuid(0)].do is SHED
    assert by_device[gpus.uuid(1)].do is RESTART
    assert by_device[gpus.uuid(2)].do is SHED
    assert by_device[gpus.uuid(3)].do is DRAIN
    assert "recovery action is 0, none" in by_device[gpus.uuid(1)].reason


def watched(gpus, policy, happen, many, every_s=0.05):
    """The first verdict on each of `many` devices, after what `happen` does once every device has been asked about."""
    prober = ProberProcess(every_s, 60.0, {**os.environ, **gpus.env(os.environ)})
    prober.start()
    watch = DeviceWatch(policy, prober, lambda text: None)
    seen = {}
    try:
        end = time.monotonic() + 60
        while len(watch.reports) < many:
            assert not watch.look() and time.monotonic() < end
            time.sleep(0.01)
        happen()
        while len(seen) < many:
            for verdict in watch.look():
                seen.setdefault(verdict.finding.device, verdict)
            assert time.monotonic() < end, f"only {len(seen)} of {many}"
            time.sleep(0.01)
    finally:
        watch.close()
    return list(seen.values())


@pytest.mark.parametrize("code", [13, 31, 43])
def test_an_applications_xid_never_sheds_however_often(code):
    """A page fault is the program's: a hundred of them on one GPU still only restart the program."""
    found = [xid_finding("GPU-a", code, None)] * 100
    assert verdict_of(*found, times=range(0, 1000, 10)).do is RESTART


@pytest.mark.parametrize(
    ("condition", "do"),
    [("gone", SHED), ("lost", SHED), ("reset-required", SHED), ("ecc-uncorrected", SHED), ("remap-failure", PERM), ("remap-pending", LOG),
     ("hw-slowdown", LOG), ("nvlink-down", SHED), ("fabric", DRAIN), ("driver-error", LOG), ("query-hangs", LOG)],
)  # fmt: skip
def test_every_condition_has_its_action(condition, do):
    """What a first sighting of each condition leads to."""
    assert verdict_of(Finding(device="GPU-a", condition=condition)).do is do


def test_strikes_count_within_their_window_only():
    """Three driver errors within a minute shed; spread over an hour they do not, and the reason says how many."""
    error = Finding(device="GPU-a", condition="driver-error", evidence="temperature: Unknown Error")
    shed = verdict_of(error, error, error, times=(0, 2, 4))
    assert shed.do is SHED
    assert "3 times within 4 s" in shed.reason
    assert verdict_of(error, error, error, times=(0, 1800, 3600)).do is LOG
    assert verdict_of(error, Finding(device="GPU-a", condition="hw-slowdown"), error, times=(0, 1, 2)).strikes == 2


def test_an_action_for_jobs_of_many_is_milder_alone():
    """Draining peer-to-peer traffic concerns a GPU with peers: a job of one GPU goes on."""
    found = Finding(device="GPU-a", condition="recovery-action", recovery_action=3)
    assert verdict_of(found).do is SHED
    assert verdict_of(found, alone=True).do is LOG


def test_terms_double_up_to_the_longest():
    """A repeat offender stays away twice as long each time, and never longer than the policy's limit."""
    policy = load()
    assert [policy.term(n) for n in (1, 2, 3)] == [600, 1200, 2400]
    assert policy.term(50) == 24 * 3600


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b.update(surprise=1), "'surprise' is unknown"),
        (lambda b: b["xids"].update({"79-": {"do": "SHED"}}), "'79-' is neither a number nor a span"),
        (lambda b: b["xids"].update({"79, 200": {"do": "SHED"}}), "79 is already spoken for"),
        (lambda b: b["xids"]["79"].update(then="PERM"), "strikes, within and then go together"),
        (lambda b: b["xids"]["79"].update(do="PANIC"), "'PANIC' is not one of LOG, RESTART, SHED, DRAIN, PERM"),
        (lambda b: b["xids"]["79"].update(dO="LOG"), "'dO' is unknown"),
        (lambda b: b["conditions"].update(bored={"do": "LOG"}), "'bored' is unknown"),
        (lambda b: b["conditions"].pop("gone"), "'gone' is missing"),
        (lambda b: b["probe"].update(every="often"), "'often' is no time"),
        (lambda b: b["xids"].pop("other"), "'other' is missing"),
        (lambda b: b.update(schema=2), "2 is not 1"),
    ],
)
def test_a_mistake_in_the_file_is_named(edited, change, said):
    """A policy file with any mistake is refused before anything runs, and the sentence names the mistake and its place."""
    with pytest.raises(PolicyError, match=r"policy\.yaml") as error:
        load(edited(change))
    assert said in str(error.value)


def test_a_users_policy_takes_effect(edited):
    """What the user's file says is what is done."""
    policy = load(edited(lambda b: b["xids"]["13"].update(do="SHED")))
    assert judge(policy, [(0.0, xid_finding("GPU-a", 13, None))]).do is SHED
