"""Steps, labels and learning rates over restarts: nothing is done twice without being counted, and nothing is left out."""

import json
import math
import re

import pytest

from goodrun.elastic_runner.events import AttemptStarted, Failed, Notice, RankProgress, Restored


def test_every_step_counts_once(job):
    """A weight that grows by 1 a step is exactly 20 after 20 steps and three kills; labels repeat only after the restored step."""
    chaos = "kill:rank=0@step=3; kill:rank=1@step=7; kill:rank=0@step=11"
    j = job("--nproc-per-node", 2, "--chaos", chaos, "counting.py", 20, 2).ok()
    assert len(j.events(Failed)) == 3
    lines = [line.split() for line in (j.where / "steps.r1").read_text().splitlines()]
    assert abs(float(lines[-1][2]) - 20) < 1e-4
    assert {int(step) for step, _, _ in lines} == set(range(1, 21))
    rates = {step: {rate for s, rate, _ in lines if s == step} for step, _, _ in lines}
    assert all(len(seen) == 1 for seen in rates.values()), "a step has the same learning rate in every attempt"
    weights = {step: {round(float(w)) for s, _, w in lines if s == step} for step, _, _ in lines}
    assert all(seen == {int(step)} for step, seen in weights.items())
    assert [e.step for e in j.events(Restored)] == [2, 6, 10]


def test_the_learning_rate_goes_on_at_a_smaller_world_size(job):
    """Cosine with warm-up: a rank is lost in the warm-up, another killed after it, and each step has the rate of an unbroken run."""
    chaos = "slot-lost:rank=2@step=3; kill:rank=1@step=9"
    j = job("--nproc-per-node", 3, "--chaos", chaos, "counting.py", 14, 2).ok()
    assert [a.world_size for a in j.events(AttemptStarted)] == [3, 2, 2]
    lines = [line.split() for line in (j.where / "steps.r0").read_text().splitlines()]
    assert {int(step) for step, _, _ in lines} == set(range(1, 15))
    for step, rate, weight in ((int(s), float(r), float(w)) for s, r, w in lines):
        assert rate == pytest.approx(min(1, step / 5) * (1 + math.cos(math.pi * (step - 1) / 40)) / 2, abs=1e-11)
        assert weight == pytest.approx(step, abs=1e-4)


def test_saves_come_when_they_cost_least(job):
    """every="auto": the interval and what it costs are said and kept in the record; after a failure saves come more often."""
    j = job("--nproc-per-node", 2, "--chaos", "kill:rank=1@step=20", "train.py", 40, "auto").ok()
    found = [re.match(r"a checkpoint every (\d+) steps \(([\d.]+) s\): a save stalls .* cost ([\d.]+)%", n.text) for n in j.events(Notice)]
    (steps, seconds, cost), (_, after, costs) = (tuple(map(float, m.groups())) for m in found if m)
    assert steps > 40 and after < seconds / 5, "one failure an hour, and not two in ten years"
    assert 0 <= cost < costs < 100
    assert j.err.count(": a save stalls ") == 2, "rank 0 has said it, too"
    waits = [max(e.save_stall_s) for e in j.events(RankProgress) if e.attempt == 0]
    assert 0 < waits[-1] < seconds / 100, "what a save stalls is at most one part in a hundred of the time between two"
    assert [r.step for r in j.events(Restored)] == [6], "four steps are timed, one save is timed, and the next is far away"


def test_attempts_that_keep_nothing_are_named(job):
    """Attempts that die before their first checkpoint: from the second on a line says so, with both intervals."""
    chaos = "kill:rank=0@step=3; kill:rank=1@step=4; kill:rank=0@step=5"
    j = job("--nproc-per-node", 2, "--chaos", chaos, "counting.py", 8, 50).ok()
    said = [e.text for e in j.events(Notice) if e.text.startswith("no progress is kept")]
    assert len(said) == 2
    assert "2 attempts in a row ended before a checkpoint, the last after 4 steps, and a checkpoint comes every 50 steps" in said[0]


def test_a_launcher_whose_clock_is_behind_goes_on(job):
    """The launcher before it has begun in its future: it restores, comes back from a kill, and commits all the same."""
    fence = job("--nproc-per-node", 2, "train.py", 10).ok().where / "checkpoints" / ".fence.json"
    started = json.loads(fence.read_text())["started"] + 3600 * 10**9
    fence.write_text(json.dumps({"started": started, "generation": 0}))
    j = job("--nproc-per-node", 2, "--chaos", "kill:rank=1@step=18", "train.py", 25).ok()
    assert [r.step for r in j.events(Restored)][-2:] == [10, 15]
    assert json.loads(fence.read_text()) == {"started": started + 1, "generation": 1}
