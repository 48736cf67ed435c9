"""A crash-consistency tester that we did not write, pointed at a job of ours (docs/testing.md says what it covers)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("chaos_train.py")


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_it_finds_nothing(tmp_path: Path) -> None:
    """Killed at each file event of its saves, the job comes back with the bits of an unbroken run, without anybody's help."""
    pytest.importorskip("ckpt_chaos")
    options = ["--step-regex", r"restored step (\d+)", "--result-file", "{out}/final.json", "--jobs", "1"]
    command = [sys.executable, "-m", "ckpt_chaos", "run", *options, "--", sys.executable, str(JOB), "{out}"]
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert (passed := re.search(r"^PASS: (\d+)$", ended.stdout, re.MULTILINE)) is not None, "nothing but PASS"
    assert int(passed[1]) >= 20
