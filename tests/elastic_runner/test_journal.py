"""The record: every event comes back as it was written, and neither a torn line nor a full disk costs more than the line."""

import dataclasses
import json
import subprocess
import sys
import typing
from datetime import datetime, timezone

import pytest

from goodrun.elastic_runner import events
from goodrun.elastic_runner.events import Decided, Notice, RunEnded, RunStarted
from goodrun.elastic_runner.journal import FILE_NAME, Journal, parse_line, read_events

NOON = datetime(2026, 1, 2, 12, 0, 0, 250_000, tzinfo=timezone.utc)


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path, clock=lambda: 12.3456789, wall=lambda: NOON, node="n1")
    yield made
    made.close()


def filled(cls):
    """An event with a telling value in every field."""
    kinds = typing.get_type_hints(cls)
    values = {
        int: lambda i: 7 + i,
        float: lambda i: i + 0.5,
        float | None: lambda i: i + 0.25,
        str: lambda i: f'words "{i}" — ü\nsecond line',
        bool: lambda i: True,
        tuple[int, ...]: lambda i: (i, i + 1),
        tuple[str, ...]: lambda i: (f"a{i}", ""),
        tuple[float, ...]: lambda i: (0.25, float(i)),
    }
    return cls(**{f.name: values[kinds[f.name]](i) for i, f in enumerate(dataclasses.fields(cls))})


@pytest.mark.parametrize("cls", events.KINDS.values(), ids=lambda c: c.name)
def test_every_event_comes_back_as_it_was_written(journal, cls):
    """One JSON line each, whatever the text holds; `write` returns what a reader will see."""
    written = journal.write(filled(cls))
    assert (journal.run_dir / FILE_NAME).read_bytes().count(b"\n") == 1
    assert list(read_events(journal.run_dir)) == [written]
    assert type(written) is cls


def test_every_kind_of_event_is_known():
    """Each subclass of Event is in the table under its own name, or a reader would drop it."""
    assert set(events.KINDS.values()) == set(events.Event.__subclasses__())
    assert all(name == cls.name for name, cls in events.KINDS.items())


def test_events_are_stamped(journal):
    """Monotonic and wall time, node and attempt come from the journal; a time that the event brings is kept."""
    journal.attempt = 3
    event = journal.write(Notice(text="x"))
    assert (event.t, event.wall, event.node, event.attempt) == (12.345679, "2026-01-02T12:00:00.250+00:00", "n1", 3)
    assert journal.write(Notice(t=5.0, text="y")).t == 5.0


def test_an_event_is_on_its_way_to_the_disk_when_write_returns(journal):
    """Nothing is kept back: a launcher killed the next moment has told it."""
    journal.write(Notice(text="x"))
    assert json.loads((journal.run_dir / FILE_NAME).read_text()) == {
        "event": "notice", "t": 12.345679, "wall": "2026-01-02T12:00:00.250+00:00", "node": "n1", "attempt": -1, "text": "x"
    }  # fmt: skip


def test_a_torn_line_does_not_swallow_the_next(tmp_path):
    """A launcher that died while it wrote loses its last line only; the next life's first line is whole."""
    (tmp_path / FILE_NAME).write_bytes(b'{"event": "notice", "text": "whole"}\n{"event": "notice", "te')
    journal = Journal(tmp_path)
    journal.write(RunStarted(run_id="second"))
    journal.close()
    assert [getattr(e, "text", "") or e.run_id for e in read_events(tmp_path)] == ["whole", "second"]


def test_a_record_is_gone_on_with(tmp_path):
    """A second life appends; nothing of the first is lost and no empty line comes between."""
    for run_id in ("first", "second"):
        journal = Journal(tmp_path)
        journal.write(RunStarted(run_id=run_id))
        journal.close()
    assert [e.run_id for e in read_events(tmp_path)] == ["first", "second"]
    assert len((tmp_path / FILE_NAME).read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{",
        b'{"event": "notice", "text": "to',
        b"null",
        b"[]",
        b"7",
        b'"notice"',
        b"{}",
        b'{"event": "invented-later", "text": "x"}',
        b'{"event": null}',
        b'{"event": ["notice"]}',
        b"\xff\xfe\x00",
        b"\0" * 100,
    ],
)
def test_damaged_and_unknown_lines_are_skipped(tmp_path, line):
    """Torn, damaged, or of a kind that only a newer version knows: no event, and no exception."""
    assert parse_line(line) is None
    (tmp_path / FILE_NAME).write_bytes(line.rstrip(b"\n") + b'\n{"event": "notice", "text": "after"}\n')
    assert [e.text for e in read_events(tmp_path)] == ["after"]


def test_fields_of_a_newer_writer_are_dropped():
    """A known event keeps what is known of it; what is missing has its default; a list is a tuple."""
    line = b'{"event": "decided", "action": "restart", "slots": [0, 2], "invented_later": {"a": 1}}'
    assert parse_line(line) == Decided(action="restart", slots=(0, 2))


def test_a_missing_directory_is_told_at_once(tmp_path):
    """The record cannot be opened: OSError, before anything is started."""
    with pytest.raises(FileNotFoundError):
        Journal(tmp_path / "nowhere")


def test_a_full_device_loses_lines_not_the_run(tmp_path):
    """Nothing can be written: `write` goes on, and counts what was lost."""
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    journal = Journal(tmp_path)
    journal.write(Notice(text="a"))
    journal.write(RunEnded(outcome="succeeded"))
    assert journal.lost == 2
    journal.close()


WRITES = """
import resource, signal, sys
from pathlib import Path
from goodrun.elastic_runner.events import Notice
from goodrun.elastic_runner.journal import Journal

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does by itself
journal = Journal(Path(sys.argv[1]))
journal.write(Notice(text="before"))
full = (Path(sys.argv[1]) / "events.jsonl").stat().st_size + 50
resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
journal.write(Notice(text="cut in the middle, because not all of it has room any more"))
journal.write(Notice(text="no room at all"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.write(Notice(text="there is room again"))
print(journal.lost)
"""


def test_a_line_cut_by_a_full_disk_does_not_swallow_the_next(tmp_path):
    """The disk fills up in the middle of a line and is freed again: the two lines are lost and counted, later ones are whole."""
    done = subprocess.run([sys.executable, "-c", WRITES, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [e.text for e in read_events(tmp_path)] == ["before", "there is room again"]
    assert done.stdout == "2\n"
