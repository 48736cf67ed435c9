"""Every fault in every phase ends in the right result, judged beside one quiet take: a few of them every day, all of them on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from goodrun.elastic_runner.verdict.judging import judge
from goodrun.elastic_runner.verdict.takes import Take, perform

pytestmark = pytest.mark.timeout(600)

JOB = Path(__file__).parents[1] / "jobs" / "train.py"
MOMENTS = {
    "start": "phase=start",
    "step": "step=13",
    "save": "phase=save,step=8",
    "restore": "phase=restore",
    "start again": "phase=start,attempt=1",
    "restore again": "phase=restore,attempt=1",
}
ANYWHERE = ("kill", "segv", "abort", "hang", "raise", "exit", "oom", "store-cut", "slow")
AFTER_A_START = ("stall", "gil")
"""A first start is not judged, and one that waits in a save or a restore has half an hour: these are tried where they are found in time."""
STORAGE = ("enospc", "eio", "read-only", "slow-storage", "torn-write", "bit-flip", "removed-file")
SILENT = ("torn-write", "bit-flip", "removed-file")
NETWORK = ("net-loss", "net-partition", "net-delay", "net-slow")
LAUNCHER = ("supervisor-kill", "keeper-kill", "nursery-kill", "preempt", "clock-jump:by=-1h")
EVERY_DAY = [("segv", "save"), ("keeper-kill", "restore again")]


def cells():
    """(fault, phase) of all that there are."""
    return [
        *[(kind, phase) for kind in (*ANYWHERE, *LAUNCHER) for phase in MOMENTS],
        *[(kind, phase) for kind in AFTER_A_START for phase in ("step", "start again")],
        *[(kind, phase) for kind in STORAGE for phase in ("step", "save")],
        *[(kind, phase) for kind in ("slot-lost", "peers-cut", *NETWORK) for phase in ("step", "save")],
        ("deadlock", "step"),
    ]


def plan(kind: str, phase: str) -> str:
    """The chaos of a cell. Whatever comes in a later attempt needs one that has failed; silent damage needs somebody who reads storage."""
    name, _, options = kind.partition(":")
    ranked = name in (*ANYWHERE, *AFTER_A_START, "slot-lost", "peers-cut", "deadlock") or name.startswith("net-")
    words = ",".join(filter(None, ["rank=1" if ranked else "", options]))
    entry = f"{name}{':' if words else ''}{words}@{MOMENTS[phase]}"
    if phase.endswith("again"):
        return f"kill:rank=0@step=7; {entry}"
    return f"{entry}; supervisor-kill@step=17" if name in SILENT else entry


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Take:
    """The job without any chaos, once for all cells."""
    folder = tmp_path_factory.mktemp("takes") / "quiet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_DIR", str(folder.parent))
        take = perform(words(folder), folder, 250)
    assert take.status == 0, (take.folder / "output.txt").read_text()
    return take


def words(folder: Path, *options: str) -> list[str]:
    """The command line of a take."""
    return ["--nproc-per-node", "3", "--run-dir", str(folder / "run"), *options, str(JOB), "24"]


@pytest.mark.parametrize(
    ("kind", "phase"),
    [pytest.param(*cell, marks=[] if cell in EVERY_DAY else [pytest.mark.exhaustive]) for cell in cells()],
)
def test_a_fault_in_a_phase_changes_nothing(kind, phase, quiet, tmp_path, monkeypatch):
    """The same weights to the last bit (but after a lost slot), the same samples, the fault on record as what it was, nothing left."""
    monkeypatch.setenv("TEST_DIR", str(quiet.folder.parent))  # the script names its checkpoints after it
    if kind in SILENT:
        monkeypatch.setenv("TEST_PAUSE", "0.2")  # the keeper yields to training, and has to have written before the launcher is killed
    take = perform(words(tmp_path / "chaos", "--chaos", plan(kind, phase)), tmp_path / "chaos", 250)
    verdict = judge(quiet, take)
    wrong = {c.name: c.text for c in verdict.checks if c.ok is False}
    assert verdict.passed, f"{wrong}\n{(take.folder / 'output.txt').read_text()[-3000:]}"
    assert len(verdict.fired) == len(plan(kind, phase).split(";"))
