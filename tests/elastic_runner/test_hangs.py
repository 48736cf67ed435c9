"""Hung ranks are found, the right one is named, and a rank that works is left alone, however long it takes."""

import os
import signal
import subprocess
import sys
import time

from goodrun.elastic_runner.bootstrap import STACK_FILE_VARIABLE
from goodrun.elastic_runner.events import AttemptStarted, FirstStep, RankHung, StackDumped, WorkersSpawned
from goodrun.progress import PAGE_FD_VARIABLE, Page


def test_a_stopped_rank_is_noticed_within_a_second(job):
    """SIGSTOP is evidence at once; its stack is in the record before it is killed."""
    j = job("--nproc-per-node", 2, "train.py", 40, env={"TEST_PAUSE": "0.05"})
    j.until(lambda: j.events(FirstStep))
    begin = time.monotonic()
    os.kill(j.events(WorkersSpawned)[0].pids[1], signal.SIGSTOP)
    hung = j.until(lambda: j.events(RankHung))[0]
    assert hung.t - begin < 1.0
    assert hung.rank == 1
    assert hung.evidence == ("stopped (state T)",)
    j.until(lambda: {e.rank for e in j.events(StackDumped) if e.stack} == {0, 1})
    j.ok()


def test_a_rank_that_sleeps_while_its_peers_wait_is_named(job):
    """All ranks fall silent at once; the one that is not in the collective is to blame, within 3 x the longest step + 1 s."""
    j = job("--nproc-per-node", 2, "train.py", 30, "sleep:1@13", env={"TEST_PAUSE": "0.1"}).ok()
    hung = j.events(RankHung)[0]
    assert hung.rank == 1
    longest = max(e.longest_step_s for e in j.events() if e.name == "progress" and e.attempt == 0)
    asleep = float((j.where / "asleep").read_text())
    assert hung.t - asleep < 3 * longest + 1
    stack = next(e.stack for e in j.events(StackDumped) if e.rank == 1)
    assert "train.py" in stack[0]
    assert len(j.events(AttemptStarted)) == 2


def test_a_rank_that_computes_for_thirty_steps_is_left_alone(job):
    """An evaluation 30 times as long as a step, on one rank, announced by nothing, is work: nobody is killed."""
    j = job("--nproc-per-node", 2, "train.py", 20, "eval:0@10=3", env={"TEST_PAUSE": "0.08"}).ok()
    assert not j.events(RankHung)
    assert len(j.events(AttemptStarted)) == 1


def test_dry_run_only_records(job):
    """--dry-run-detectors says what it would have done and kills nobody."""
    j = job("--nproc-per-node", 2, "--dry-run-detectors", "train.py", 30, env={"TEST_PAUSE": "0.05"})
    j.until(lambda: j.events(FirstStep))
    pid = j.events(WorkersSpawned)[0].pids[1]
    os.kill(pid, signal.SIGSTOP)
    hung = j.until(lambda: j.events(RankHung))[0]
    assert hung.dry_run
    os.kill(pid, signal.SIGCONT)
    j.ok()
    assert len(j.events(AttemptStarted)) == 1


def test_detection_can_be_turned_off(job):
    """--hang-detection off: a stopped rank stays the user's business."""
    j = job("--nproc-per-node", 2, "--hang-detection", "off", "train.py", 20, env={"TEST_PAUSE": "0.05"})
    j.until(lambda: j.events(FirstStep))
    pid = j.events(WorkersSpawned)[0].pids[1]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2)  # several looks' worth of nothing happening
    assert not j.events(RankHung)
    os.kill(pid, signal.SIGCONT)
    j.ok()


def test_a_question_that_comes_too_late_kills_no_rank():
    """An interpreter that ends takes faulthandler's handler off; whoever asks for a stack then gets none, and the exit status stays."""
    page, fd = Page.create()
    code = (
        "import faulthandler, os\n"
        "from goodrun.elastic_runner import bootstrap\n"
        "bootstrap.instrument()\n"
        "faulthandler.unregister(bootstrap.STACK_SIGNAL)\n"
        "os.kill(os.getpid(), bootstrap.STACK_SIGNAL)\n"
        "os._exit(7)"
    )
    env = {**os.environ, PAGE_FD_VARIABLE: str(fd), STACK_FILE_VARIABLE: os.devnull}
    assert subprocess.run([sys.executable, "-c", code], env=env, pass_fds=[fd], check=False).returncode == 7
    page.close()
    os.close(fd)
