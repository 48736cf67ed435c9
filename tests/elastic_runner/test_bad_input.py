"""What cannot work is refused in one line that names the value: status 2, nothing written, nothing started."""

import os
import socket
import subprocess
from contextlib import contextmanager

import pytest

FOUR = ("--nproc-per-node", 4)
WAITS = ("plain.py", "wait")


def refused(job) -> str:
    """The one line with which the job was refused, having checked that nothing else happened."""
    assert job.wait() == 2, job.err
    lines = job.err.splitlines()
    assert len(lines) == 1, job.err
    assert lines[0].startswith("goodrun: ")
    assert job.out == ""
    assert not job.marks("up.*")
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param(["--no-such-option", *WAITS], ["--no-such-option"], id="unknown option"),
        pytest.param(["--nproc", 2, *WAITS], ["--nproc", "ambiguous"], id="ambiguous option"),
        pytest.param([], ["no training script given"], id="no script"),
        pytest.param(["missing.py", "--x"], ["'missing.py'", "No such file"], id="missing script"),
        pytest.param(["folder"], ["'folder'", "No such file"], id="folder without __main__.py"),
        pytest.param(["-m", "no_such_module"], ["'no_such_module'", "-m"], id="missing module"),
        pytest.param(["--no-python", "no-such-program", "x"], ["'no-such-program'"], id="missing program"),
        pytest.param(["--config", "nowhere.yaml", *WAITS], ["nowhere.yaml", "No such file"], id="missing config"),
        pytest.param(["--config", "bad.yaml", *WAITS], ["bad.yaml", "not valid YAML"], id="config is no YAML"),
        pytest.param(["--config", "key.yaml", *WAITS], ["key.yaml", "'nprocs'", "nproc-per-node"], id="unknown key in config"),
        pytest.param([*FOUR, "--chaos", "kill:rank=9@step=3", *WAITS], ["rank 9", "0 to 3"], id="chaos names rank 9 of 4"),
        pytest.param([*FOUR, "--chaos", "make a mess", *WAITS], ["'make a mess'"], id="chaos is garbage"),
        pytest.param([*FOUR, "--min-nproc", 5, *WAITS], ["--min-nproc 5", "4"], id="min-nproc above nproc"),
        pytest.param([*FOUR, "--world-size-multiple-of", 3, *WAITS], ["--world-size-multiple-of 3", "4"], id="no multiple"),
        pytest.param(["--nnodes", 0, *WAITS], ["--nnodes 0"], id="no nodes"),
        pytest.param(["--nproc-per-node", 0, *WAITS], ["--nproc-per-node 0"], id="no workers"),
        pytest.param(["--nproc-per-node", "many", *WAITS], ["--nproc-per-node many"], id="nonsense workers"),
        pytest.param(
            ["--rdzv-backend", "pigeon", *WAITS],
            ["pigeon"],
            id="unknown rendezvous backend",
        ),
        pytest.param(["--log-dir", "occupied", *WAITS], ["occupied"], id="log-dir is a file"),
        pytest.param(["--redirects", 7, *WAITS], ["7"], id="nonsense redirects"),
    ],
)
def test_a_command_line_that_cannot_work(job, tmp_path, argv, words):
    """Unknown, missing, misspelt, out of range: the line names the value, and no run directory is made."""
    where = tmp_path / "job"
    (where / "folder").mkdir(parents=True)
    (where / "bad.yaml").write_text("spares: [\n")
    (where / "key.yaml").write_text("nprocs: 2\n")
    (where / "occupied").touch()
    j = job(*argv)
    line = refused(j)
    assert all(word in line for word in words), line
    assert not j.run_dir.exists()


@pytest.mark.parametrize("place", ["occupied", "occupied/below", "/proc/below"])
def test_a_run_directory_that_cannot_be_made(job, tmp_path, place):
    """A file, a place below a file, a file system that takes none: the line names it and the flag, and the file is as it was."""
    where = tmp_path / "job"
    where.mkdir()
    (where / "occupied").write_text("mine")
    line = refused(job("--run-dir", place, *WAITS))
    assert place in line and "--run-dir" in line
    assert sorted(os.listdir(where)) == ["occupied", "stderr", "stdout"]
    assert (where / "occupied").read_text() == "mine"


@contextmanager
def tiny_disk(at):
    """A file system of one page, mounted at `at`; skips where that is not allowed."""
    at.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "goodrun-test", str(at)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


@pytest.mark.parametrize("free", [0, 100])
def test_a_full_disk(job, tmp_path, free):
    """No room for the record's first line: refused before anything is started, and what little was written is taken away again."""
    with tiny_disk(tmp_path / "disk") as disk:
        (disk / "filler").write_bytes(b"x" * 4096)
        if free:  # the first line begins and does not end
            (disk / "filler").unlink()
            (disk / "run").mkdir()
            (disk / "run" / "events.jsonl").write_bytes(b"x" * (4095 - free) + b"\n")
        line = refused(job("--run-dir", disk / "run", *WAITS))
        assert str(disk / "run") in line and "space" in line
        assert os.listdir(disk) == (["run"] if free else ["filler"])


@contextmanager
def taken_port():
    """A port that somebody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield s.getsockname()[1]


@pytest.mark.parametrize("how", ["static", "static, two nodes"])
def test_a_taken_port(job, how):
    """The line names the port and the flags; it is known before any worker is started."""
    with taken_port() as port:
        flags = {
            "static": ["--nnodes", 1, "--master-port", port],
            "static, two nodes": ["--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", port],
        }[how]
        line = refused(job(*flags, *WAITS))
    assert str(port) in line and "--master-port" in line
