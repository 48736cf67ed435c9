"""Whole rehearsals: `--chaos-verdict` plays a job twice and says what the chaos has changed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from goodrun.elastic_runner.verdict.takes import living


@pytest.fixture
def rehearsal(job):
    """A rehearsal, with its folder as the run's."""

    def start(*argv, status=0, **kwargs):
        j = job(*argv, **kwargs)
        assert j.wait(110) == status, f"{j.out}\n{j.err}"
        return j

    return start


def said_again(folder, *options):
    words = [sys.executable, "-m", "goodrun", "verdict", str(folder), *options]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_a_job_that_survives_its_chaos_passes(rehearsal, tmp_path):
    """A kill, a damaged checkpoint and the death of the launcher: the same weights, the same samples, nothing left; twice said alike."""
    chaos = "kill:rank=1@step=12; torn-write@step=15; supervisor-kill@step=18"
    env = {"TEST_PAUSE": "0.05"}
    j = rehearsal("--nproc-per-node", 2, "--chaos", chaos, "--chaos-verdict", "--json", "train.py", 30, env=env)
    told = json.loads(j.out)
    assert told["verdict"] == "PASS"
    assert sorted(told["fired"]) == sorted(chaos.split("; "))  # a save and a step are not in step
    assert {c["name"]: c["ok"] for c in told["checks"]} == dict.fromkeys(
        ("ends well", "faults fired", "faults seen", "same weights", "same samples", "goodput", "left behind"), True
    )
    assert "equal to the last bit" in j.out and "with 2 launchers" in j.out
    assert not (j.where / "checkpoints").exists()
    assert not living(j.run_dir / "chaos")
    assert json.loads((j.run_dir / "verdict.json").read_text()) == told
    again = said_again(j.run_dir, "--json")
    assert (again.returncode, json.loads(again.stdout)) == (0, told)
    assert said_again(tmp_path).returncode == 2


def test_a_script_that_is_not_resilient_fails(rehearsal):
    """A process that outlives the job is named; what cannot be compared is not held against it."""
    j = rehearsal("--nproc-per-node", 2, "--chaos", "kill:rank=1@step=3", "--chaos-verdict", "leaves.py", status=1)
    assert j.out.startswith("FAIL")
    assert "process" in j.out and "sleep" in j.out


def test_without_a_quiet_take_that_works_there_is_no_verdict(rehearsal):
    """A script that fails by itself is not judged: status 2; nor is a rehearsal without any chaos, or in a folder that has one."""
    j = rehearsal("--nproc-per-node", 1, "--chaos", "kill:rank=0@step=3", "--chaos-verdict", "cannot_start.py", status=2)
    assert "the quiet take failed" in j.err
    assert "nothing to judge" in rehearsal("--nproc-per-node", 1, "--chaos-verdict", "train.py", status=2, name="none").err
    words = ["--nproc-per-node", 1, "--chaos", "kill:rank=0@step=3", "--chaos-verdict", "train.py"]
    assert "holds a rehearsal already" in rehearsal("--run-dir", j.run_dir, *words, status=2).err
