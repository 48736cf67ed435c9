"""Whole jobs while their storage is down for a time or for good: a volume over the Files API, or a disk that is full or read-only."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.places import located
from goodrun.checkpoint.remote import bucket, objects
from goodrun.elastic_runner.dashboard.board import Board
from goodrun.elastic_runner.dashboard.command import board_as_dict
from goodrun.elastic_runner.events import FirstStep, Notice, RankProgress, Restored, RunEnded, WorkersSpawned
from goodrun.elastic_runner.exporting.status import words
from goodrun.elastic_runner.reading import checkpoints_main

from ..checkpoint.far import Fault, FilesApi
from ..checkpoint.test_real_disk import tmpfs  # noqa: F401 (a fixture)


@pytest.fixture
def server(monkeypatch):
    """A volume; this process and the jobs find it through the environment."""
    pytest.importorskip("databricks.sdk")
    with FilesApi().serving() as found:
        found.token = "dapi-sEcReT" + found.token
        monkeypatch.setenv("DATABRICKS_HOST", found.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", found.token)
        monkeypatch.setenv("TEST_CHECKPOINTS", f"{found.volume}/run")
        bucket.bucket_of.cache_clear()
        objects._persistence.cache_clear()
        yield found
    bucket.bucket_of.cache_clear()


def durable(server):
    """The steps that are whole there."""
    return sorted({int(path.split("step-")[1][:10]) for path in list(server.files) if path.endswith("manifest.json")})


def status_lines(j):
    """What the line at the bottom of the terminal said, event by event."""
    board, lines = Board(), []
    for e in j.events():
        board.add(e)
        lines.append(words(board, board.step))
    return lines


def board(j):
    """What `goodrun top --json` says."""
    return board_as_dict(Board().extend(j.events()))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seconds", [6, pytest.param(120, marks=pytest.mark.exhaustive)])
def test_down_for_a_while(job, server, seconds):
    """Storage answers 503 for a while: no restart, no failure, every step is trained, the last one is durable, and the record tells it."""
    j = job("--nproc-per-node", 2, "train.py", 300, env={"TEST_PAUSE": str(max(0.02, seconds / 200))})  # longer than the outage
    j.until(lambda: durable(server), timeout=100)
    began = time.monotonic()
    server.plan.faults = [Fault(status=503)]
    j.until(lambda: any("has not answered" in e.text for e in j.events(Notice)) and time.monotonic() - began > seconds, timeout=300)
    server.plan.faults, ended = [], time.monotonic()
    j.ok(200)
    times = [float(line.split()[0]) for line in (j.where / "times.g000.r0").read_text().splitlines()]
    assert max(after - before for before, after in pairwise(times)) < 30, "no step waits for the outage's end"
    assert seconds < 60 or sum(began + 30 < t < ended for t in times) > 30, "training goes on"
    assert durable(server)[-1] == 300
    told = [e.text for e in j.events(Notice)]
    assert any("storage answers again after" in text for text in told)
    assert any("has not answered" in line for line in status_lines(j)), "the line at the bottom says so while it lasts"
    assert "not saved" not in status_lines(j)[-1] and board(j)["storage_trouble"] == "", "and no longer, once all is well"
    assert len(j.events(WorkersSpawned)) == 1
    done = [int(line.split()[0]) for line in (j.where / "samples.l0.g000.r0").read_text().splitlines()]
    assert done == list(range(1, 301))


@pytest.mark.timeout(300)
def test_a_rank_dies_while_storage_is_down(job, server):
    """The job is back from the keeper's memory, of which storage has nothing yet, and goes on; once storage answers, all is durable."""
    j = job("--nproc-per-node", 2, "train.py", 100, env={"TEST_PAUSE": "0.1"})
    j.until(lambda: durable(server), timeout=100)
    server.plan.faults = [Fault(status=503)]
    j.until(lambda: max((e.saved_step for e in j.events(RankProgress)), default=-1) > durable(server)[-1])
    os.kill(j.events(WorkersSpawned)[0].pids[1], signal.SIGKILL)
    j.until(lambda: len(j.events(FirstStep)) == 2, timeout=100)
    [restored] = j.events(Restored)
    assert restored.step > durable(server)[-1]
    server.plan.faults = []
    j.ok(200)
    assert durable(server)[-1] == 100


@pytest.mark.parametrize("how", ["read-only", "full"])
def test_a_rank_dies_while_the_disk_takes_nothing(job, tmpfs, how):  # noqa: F811
    """The same with a directory that cannot be claimed: the job is back from memory, and all is durable once the disk is well again."""
    place, ballast = tmpfs.path / "run", tmpfs.path / "ballast"

    def newest():
        return next((f.step for f in found_in(place) if f.manifest is not None), -1)

    j = job("--nproc-per-node", 2, "train.py", 100, env={"TEST_PAUSE": "0.1", "TEST_CHECKPOINTS": str(place)})
    j.until(lambda: newest() > 0, timeout=100)
    if how == "full":
        with suppress(OSError), open(ballast, "wb", buffering=0) as f:
            while True:
                f.write(bytes(4096))
    else:
        subprocess.run(tmpfs.remounting("ro"), check=True)
    last = newest()
    j.until(lambda: max((e.saved_step for e in j.events(RankProgress)), default=-1) > last)
    os.kill(j.events(WorkersSpawned)[0].pids[1], signal.SIGKILL)
    j.until(lambda: len(j.events(FirstStep)) == 2, timeout=100)
    [restored] = j.events(Restored)
    assert restored.step > last
    if how == "full":
        ballast.unlink()
    else:
        subprocess.run(tmpfs.remounting("rw"), check=True)
    j.ok()
    assert newest() == 100


@pytest.mark.timeout(300)
def test_gone_for_good(job, server, tmp_path, capsys):
    """Training goes on to its end, the status is 1, the last snapshot lies on this node's disk, and no secret anywhere."""
    j = job("--nproc-per-node", 2, "--storage-patience", 1, "train.py", 30)
    j.until(lambda: durable(server), timeout=100)
    server.plan.faults = [Fault(status=503, body=server.token.encode())]
    assert j.wait(200) == 1
    done = [int(line.split()[0]) for line in (j.where / "samples.l0.g000.r0").read_text().splitlines()]
    assert done == list(range(1, 31))
    assert j.events(RunEnded)[0].status == 1
    [told] = {e.text for e in j.events(Notice) if "uploaded with" in e.text}
    assert told in j.err
    assert told in status_lines(j)[-1]
    assert board(j)["storage_trouble"] == told, "goodrun top --json"
    command = told.partition("uploaded with: ")[2].split()
    kept = Path(command[3])
    assert kept.is_relative_to(tmp_path / "state")
    assert [f.step for f in found_in(kept.parent)] == [30]
    server.plan.faults = []
    assert checkpoints_main(command[2:]) == 0
    assert found_in(located(f"{server.volume}/run"))[0].step == 30
    left = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(left) > 10
    assert not any(server.token.encode() in what for what in left)
    assert server.token not in "".join(capsys.readouterr())
