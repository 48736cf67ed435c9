"""Every block of docs/guide.md is what its files say, and runs."""

import difflib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts" / "examples" / "guide"
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^(?:<!-- (\S+) -->\n)?```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path):
    """A folder with the scripts, and what a shell in it needs to find goodrun."""
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "goodrun").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m goodrun "$@"\n')
    (tmp_path / "bin" / "goodrun").chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "GOODRUN_", "TORCHELASTIC_", "SLURM_"))}
    env |= {"PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "GOODRUN_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def shell(commands):
        done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=110)
        assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    return shell


def test_every_block_is_of_a_kind_that_is_checked():
    """A block of another kind would be checked by nobody."""
    assert {kind for _, kind, _ in BLOCKS} == {"python", "diff", "sh"}
    assert GUIDE.count("\n```") == 2 * len(BLOCKS)


@pytest.mark.parametrize(("file", "text"), [(file, text) for file, kind, text in BLOCKS if kind == "python"])
def test_what_is_quoted_is_in_the_file(file, text):
    """The whole file, or lines of it that follow each other."""
    assert f"\n{text}" in f"\n{(SCRIPTS / file).read_text(encoding='utf-8')}"


@pytest.mark.parametrize("text", [text for _, kind, text in BLOCKS if kind == "diff"])
def test_each_step_is_the_difference_of_two_files(text):
    """Nothing is left out that a reader would have to guess."""
    before, after = re.findall(r"^(?:---|\+\+\+) (\S+)$", text, re.MULTILINE)[:2]
    lines = [(SCRIPTS / name).read_text(encoding="utf-8").splitlines(keepends=True) for name in (before, after)]
    assert text == "".join(difflib.unified_diff(*lines, before, after, n=1))


def test_every_script_is_shown():
    """An example that the guide does not lead to would not be run by anybody."""
    named = {file for file, _, _ in BLOCKS if file}
    named |= {name for _, kind, text in BLOCKS if kind == "diff" for name in re.findall(r"^\+\+\+ (\S+)$", text, re.MULTILINE)}
    assert named == {path.name for path in SCRIPTS.glob("*.py")}


def run(place, commands):
    """All of them in one folder, as a reader would type them; each job ends at its last step, hit by the chaos it was given."""
    for text in commands:
        said = place(text)
        if "--nproc-per-node" in text:
            assert "step 60, loss" in said
            assert ("restarting" in said) is ("--chaos" in text)


def test_the_commands_of_the_checkpointer_run(place):
    """Those that need no other step of the guide before them, and those that start no job."""
    quick = ("4_checkpointer.py", "goodrun plan", "goodrun goodput", "slurm-script")
    run(place, [text for _, kind, text in BLOCKS if kind == "sh" and any(word in text for word in quick)])


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_commands_run(place):
    """All of them, in order."""
    commands = [text for _, kind, text in BLOCKS if kind == "sh"]
    assert sum(text.count(".py\n") for text in commands if "--nproc" in text) == 8
    run(place, commands)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("library", "script"), [("transformers", "trainer.py"), ("lightning", "lightning_fit.py")])
def test_the_frameworks_examples_run(place, library, script):
    """Killed once, each goes on from its checkpoint."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'goodrun[{library}]'")
    assert "restored step" in place(f"goodrun --nproc-per-node 2 --chaos 'kill:rank=1@step=5' {script}")
