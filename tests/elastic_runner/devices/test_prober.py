"""The prober's promises: every answer is what the driver said, and what cannot be had is said, never taken for health."""

from __future__ import annotations

import os
import signal

from goodrun.elastic_runner.devices.answers import Report, Told
from goodrun.elastic_runner.devices.asking import Found, ProberProcess, Trouble, Xid
from goodrun.elastic_runner.devices.kernel_log import LOG_VARIABLE


def reports_of(uuid):
    return lambda h: isinstance(h, Report) and h.device == uuid


def test_the_devices_are_known_by_uuid_and_their_answers_by_name(gpus, prober, hear):
    """The first word names all devices in the driver's order; each report holds what the driver answered."""
    gpus.set(2, "temperature", 71)
    gpus.set(2, "field.230", 0)
    heard = hear(prober(), reports_of(gpus.uuid(3)))
    assert isinstance(heard[0], Found)
    assert [(d.uuid, d.index) for d in heard[0].devices] == [(gpus.uuid(n), n) for n in range(4)]
    by_device = {h.device: h for h in heard if isinstance(h, Report)}
    assert by_device[gpus.uuid(2)].value("temperature") == 71
    assert by_device[gpus.uuid(2)].value("recovery_action") == 0
    assert by_device[gpus.uuid(1)].value("temperature") == 40


def test_an_error_and_an_unsupported_question_are_two_answers(gpus, prober, hear):
    """'Unknown error' is an error with the driver's words; 'not supported' is its own answer, and neither is a value."""
    gpus.set(1, "returns", 999)
    gpus.set(2, "DeviceGetTotalEccErrors.returns", 3)
    heard = hear(prober(), reports_of(gpus.uuid(2)))
    by_device = {h.device: h for h in heard if isinstance(h, Report)}
    wedged, fine = by_device[gpus.uuid(1)], by_device[gpus.uuid(2)]
    assert {q for q, _ in wedged.failed()} == wedged.answers.keys() - {"present"}
    assert "Unknown Error" in wedged.answers["temperature"].text
    assert fine.answers["ecc_uncorrected"].told is Told.UNSUPPORTED
    assert fine.value("ecc_uncorrected") is None
    assert not list(fine.failed())


def test_a_question_that_hangs_is_an_answer_and_the_others_are_asked_on(gpus, prober, hear):
    """Past its deadline a hanging question is reported as hung, by name; a new prober goes on with the healthy devices."""
    gpus.set(1, "DeviceGetTemperature.hangs", 1, for_s=60)
    p = prober(deadline_s=1.0)
    before = p.pid
    heard = hear(p, lambda h: isinstance(h, Report) and any(a.told is Told.HUNG for a in h.answers.values()))
    assert heard[-1].device == gpus.uuid(1)
    assert heard[-1].answers["temperature"].told is Told.HUNG
    hear(p, reports_of(gpus.uuid(0)))
    assert p.pid != before


def test_a_killed_prober_is_said_and_replaced(gpus, prober, hear):
    """Whoever kills the prober, its death is told in words and another asks on."""
    p = prober()
    hear(p, reports_of(gpus.uuid(3)))
    before = p.pid
    os.kill(before, signal.SIGKILL)
    trouble = hear(p, lambda h: isinstance(h, Trouble))[-1]
    assert "killed by signal 9" in trouble.text
    hear(p, reports_of(gpus.uuid(3)))
    assert p.pid != before


def test_a_stopped_prober_is_noticed_and_replaced(gpus, prober, hear):
    """A prober that says nothing for longer than its deadline, in no question, is told and replaced."""
    p = prober(deadline_s=1.5)
    hear(p, reports_of(gpus.uuid(3)))
    before = p.pid
    os.kill(before, signal.SIGSTOP)
    hear(p, lambda h: isinstance(h, Trouble))
    hear(p, reports_of(gpus.uuid(3)))
    assert p.pid != before


def test_a_device_that_falls_off_the_bus_shifts_no_other(gpus, prober, hear):
    """Without any XID: the lost device is not found any more, and the reports of those behind it stay theirs."""
    gpus.set(3, "temperature", 77)
    p = prober()
    hear(p, reports_of(gpus.uuid(3)))
    gpus.set(1, "gone", 1)
    gone = hear(p, lambda h: isinstance(h, Report) and h.device == gpus.uuid(1) and h.value("present") is None)[-1]
    assert gone.answers["present"].text == "Not Found"
    assert hear(p, reports_of(gpus.uuid(3)))[-1].value("temperature") == 77


def test_an_xid_comes_at_once_with_the_drivers_own_advice(gpus, prober, hear):
    """An XID is told as an event of its device, with field 230 as it is after it; where that is unsupported, that is told."""
    p = prober(every_s=20.0)
    hear(p, reports_of(gpus.uuid(3)))
    gpus.set(2, "field.230", 1)
    gpus.xid(2, 79)
    gpus.xid(1, 31)
    first, second = (hear(p, lambda h: isinstance(h, Xid), timeout=10)[-1] for _ in range(2))
    assert (first.device, first.code, first.recovery.value) == (gpus.uuid(2), 79, 1)
    assert (second.device, second.code, second.recovery.told) == (gpus.uuid(1), 31, Told.UNSUPPORTED)


def test_an_xid_in_the_kernels_log_is_heard_too(gpus, prober, hear, tmp_path, monkeypatch):
    """A device is named there by its place on the bus; what was written before, or is of no device here, is not told."""
    log = tmp_path / "kmsg"
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:03:00): 95, old\n")
    monkeypatch.setenv(LOG_VARIABLE, str(log))
    p = prober(every_s=20.0)
    hear(p, reports_of(gpus.uuid(3)))
    with log.open("a") as f:
        f.write("4,2,2,-;NVRM: Xid (PCI:0000:4f:00): 13, of another\n4,3,3,-;NVRM: Xid (PCI:0000:03:00.0): 79, pid=12, GPU has fallen\n")
    heard = hear(p, lambda h: isinstance(h, Xid), timeout=10)[-1]
    assert (heard.device, heard.code) == (gpus.uuid(2), 79)


def test_without_a_driver_it_is_said_that_nothing_is_watched(gpus, prober, hear):
    """A driver that is not loaded makes no device look healthy: one sentence says that none is watched."""
    gpus.set_driver("Init.returns", 9)
    trouble = hear(prober(), lambda h: True)[0]
    assert isinstance(trouble, Trouble)
    assert not trouble.asks
    assert "not watched" in trouble.text and "Driver Not Loaded" in trouble.text


def test_without_a_library_it_is_said_that_nothing_is_watched(hear):
    """The same where there is no NVIDIA library at all, which is what any CPU machine is."""
    p = ProberProcess(0.05, 30.0, {**os.environ, "LD_LIBRARY_PATH": ""})
    p.start()
    try:
        trouble = hear(p, lambda h: True)[0]
        assert isinstance(trouble, Trouble | Found)  # a machine with a GPU has one
        assert isinstance(trouble, Found) or "not watched" in trouble.text
    finally:
        p.close()
