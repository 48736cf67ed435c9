"""The way back of a slot that was left out: nobody returns untested, and who fails again and again stays out."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from goodrun.elastic_runner.devices.answers import Told
from goodrun.elastic_runner.devices.asking import ProberProcess
from goodrun.elastic_runner.devices.findings import Finding
from goodrun.elastic_runner.devices.health_policy import Do, Verdict, load
from goodrun.elastic_runner.devices.identity import Bound
from goodrun.elastic_runner.devices.ledger import Ledger
from goodrun.elastic_runner.devices.probation import Probation, Retest
from goodrun.elastic_runner.events import DeviceSetAside, DeviceTested

VERDICT = Verdict(do=Do.SHED, finding=Finding(device="GPU", condition="gone", evidence="not there"), strikes=1, reason="it fell off")


def until(test, timeout=60):
    end = time.monotonic() + timeout
    while not (value := test()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


@pytest.fixture
def probation(gpus, tmp_path):
    """A run's probation with terms of no time at all, on the simulated GPUs; and what it has recorded."""
    events = []
    made = Probation(
        replace(load(), term_s=0.0),
        Ledger(tmp_path / "ledger" / "node.json"),
        record=events.append,
        say=lambda text: None,
        run_id="7",
        env={**os.environ, **gpus.env(os.environ)},
    )
    yield made, events
    made.close()


def bound(gpus, device):
    return Bound(name=str(device), uuid=gpus.uuid(device), index=device)


@pytest.mark.parametrize(
    ("what", "passed", "said"),
    [
        (None, True, "matrix product is right"),
        ("returns", False, "driver-error"),
        ("gone", False, "gone"),
        ("remap_failure", False, "remap-failure"),
        ("ecc_corrected", True, "finds nothing"),
    ],
)
def test_a_gpu_passes_only_if_its_driver_has_nothing_against_it(gpus, what, passed, said):
    """A re-test asks the driver anew and computes; it says what it found either way."""
    if what is not None:
        gpus.set(1, what, 999)
    test = Retest(bound(gpus, 1), {**os.environ, **gpus.env(os.environ)})
    result = until(test.result)
    assert result.passed is passed
    assert said in result.detail


def test_a_cpu_slot_is_tested_by_computing():
    """A slot without a device has its memory and its arithmetic checked."""
    result = until(Retest(None, os.environ).result)
    assert result.passed
    assert "memory holds its patterns" in result.detail


def test_a_test_that_dies_is_a_failed_test(gpus):
    """A GPU whose driver kills the test, or never answers, has not passed."""
    gpus.set(1, "hangs", 1)
    test = Retest(bound(gpus, 1), {**os.environ, **gpus.env(os.environ)})
    test._process.kill()
    result = until(test.result)
    assert not result.passed
    assert "status -9" in result.detail


def test_a_slot_that_passed_waits_for_a_newer_checkpoint(gpus, probation):
    """It comes back with the first checkpoint that is complete after its test, never with one from before it."""
    made, events = probation
    made.put(2, bound(gpus, 2), "", VERDICT)
    until(lambda: made.back(40) or made.aside[2].passed_at_step is not None)
    assert made.back(40) == ()
    assert made.back(50) == (2,)
    assert made.aside == {}
    assert [type(e) for e in events] == [DeviceSetAside, DeviceTested]
    entry = made.entry(bound(gpus, 2))
    assert (entry.out, entry.offences, entry.by) == (False, 1, "run 7")


def test_three_failed_tests_in_a_row_are_for_good(gpus, probation):
    """A device that never passes is not tested for ever: the ledger keeps it out until a person lets it in."""
    made, events = probation
    gpus.set(2, "gone", 1)
    made.put(2, bound(gpus, 2), "", VERDICT)
    until(lambda: made.back(1) or made.aside[2].due_t is None)
    assert [e.passed for e in events if isinstance(e, DeviceTested)] == [False] * 3
    entry = made.entry(bound(gpus, 2))
    assert (entry.out, entry.until, entry.failed_tests) == (True, None, 3)


def test_a_slot_without_a_verdict_stays_out_of_the_ledger(gpus, probation):
    """Three crashes in a row may be bad luck: the slot is tested in this run, and no other run hears of it."""
    made, _ = probation
    made.put(1, bound(gpus, 1), "3 failures in a row", None)
    assert 1 in made.aside
    assert made.entry(bound(gpus, 1)) is None


def test_a_verdict_for_good_is_never_tested(gpus, probation):
    """PERM: no re-test by itself."""
    made, _ = probation
    made.put(1, bound(gpus, 1), "", replace(VERDICT, do=Do.PERM))
    assert made.aside[1].due_t is None
    assert made.entry(bound(gpus, 1)).until is None


@pytest.mark.gpu
def test_a_real_gpu_answers_and_passes(hear):
    """On a real GPU: it is found, tells its temperature and ECC errors or that it cannot, and passes its re-test."""
    prober = ProberProcess(1.0, 30.0, os.environ)
    prober.start()
    try:
        heard = hear(prober, lambda h: hasattr(h, "answers"))
    finally:
        prober.close()
    report = heard[-1]
    assert (report.value("temperature") or 0) > 0
    assert report.answers["ecc_uncorrected"].told in (Told.VALUE, Told.UNSUPPORTED)
    assert until(Retest(Bound(name=report.device, uuid=report.device), os.environ).result, 170).passed
