"""The quarantine ledger's promises: nothing is lost between jobs, and a bad file never stops one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from goodrun.elastic_runner.devices.ledger import Entry, Ledger, LedgerError


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "devices" / "node.json")


OFFEND = """
import sys
from dataclasses import replace
from pathlib import Path
from goodrun.elastic_runner.devices.ledger import Entry, Ledger
for _ in range(20):
    Ledger(Path(sys.argv[1])).change(sys.argv[2], lambda e: replace(e, offences=e.offences + 1) if e else Entry(device=sys.argv[2]))
"""


def test_what_is_written_is_read_by_the_next_run(ledger):
    """An entry survives as it was written, with its evidence and its end."""
    entry = Entry(device="GPU-a", name="H100", since=10.0, until=610.0, reason="XID 79", evidence="it fell off", by="run 1")
    assert ledger.read() == {}
    ledger.change("GPU-a", lambda before: entry)
    assert Ledger(ledger.path).read() == {"GPU-a": entry}
    assert [p.name for p in ledger.path.parent.glob("*.new")] == []


def test_several_jobs_write_at_once_and_nothing_is_lost(ledger):
    """Changes of jobs on one node are made one after the other: none overwrites another's."""
    jobs = [subprocess.Popen([sys.executable, "-c", OFFEND, ledger.path, device]) for device in ("GPU-a", "GPU-a", "GPU-b")]
    assert [job.wait(60) for job in jobs] == [0, 0, 0]
    assert {d: e.offences for d, e in ledger.read().items()} == {"GPU-a": 40, "GPU-b": 20}


def test_a_released_device_keeps_its_offences(ledger):
    """Let back in, its record goes on: the next offence is the second one. What is not set aside cannot be released."""
    ledger.change("GPU-a", lambda before: Entry(device="GPU-a", offences=3, until=None))
    released = ledger.release("GPU-a", 50.0, "ann")
    assert (released.out, released.offences, released.by) == (False, 3, "ann")
    for device in ("GPU-a", "GPU-b"):
        with pytest.raises(LedgerError, match="not set aside"):
            ledger.release(device, 51.0, "ann")


ODD = b'{"schema": 1, "devices": [{"device": "GPU-a", "odd": 1}]}'


@pytest.mark.parametrize("damage", [b"", b"{", b'{"schema": 1}', ODD, b"\xff\xfe", b"[]"])
def test_a_damaged_ledger_is_said_and_kept_for_people(ledger, damage):
    """Reading a damaged ledger names it; the next entry begins a new one, and the damaged file stays beside it."""
    ledger.path.parent.mkdir()
    ledger.path.write_bytes(damage)
    with pytest.raises(LedgerError, match="damaged"):
        ledger.read()
    ledger.change("GPU-b", lambda before: Entry(device="GPU-b"))
    assert list(ledger.read()) == ["GPU-b"]
    assert ledger.path.with_suffix(".damaged").read_bytes() == damage


def test_a_ledger_that_cannot_be_written_says_so(tmp_path):
    """A place that takes no file is an error with the place in it, of the one kind that a run goes on after."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot write"):
        Ledger(tmp_path / "file" / "node.json").change("GPU-a", lambda before: Entry(device="GPU-a"))


def test_a_term_is_over_when_its_time_has_come():
    """Only a device that is set aside for a while comes due; one set aside for good, or released, never does."""
    entry = Entry(device="GPU-a", until=100.0)
    assert not entry.due(99.0)
    assert entry.due(100.0)
    assert not replace(entry, until=None).due(1e12)
    assert not replace(entry, out=False).due(100.0)
