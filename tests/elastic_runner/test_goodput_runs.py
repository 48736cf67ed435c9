"""The goodput of real runs: it adds up, agrees with the history, and is printed as text, JSON and CSV."""

from __future__ import annotations

import csv
import json
import re
from itertools import pairwise

import pytest

from goodrun.elastic_runner.goodput.account import account
from goodrun.elastic_runner.goodput.buckets import Bucket
from goodrun.elastic_runner.goodput.ledger import fold_nodes
from goodrun.elastic_runner.history import fold
from goodrun.elastic_runner.reading import goodput_main, history_main, report_main


def first_cause(run, capsys) -> str:
    """What the run's report names first as what to improve, but for what every short run has: its start and its end."""
    page = run.where / "report.html"
    assert report_main([str(run.run_dir), "-o", str(page)]) == 0
    capsys.readouterr()
    told = re.findall(r"<li><b>[^<]*slot-s</b> \([^)]*\) ([^<]*)</li>", page.read_text())
    return next(words for words in told if not words.startswith(("start-up", "shutdown")))


def test_a_run_with_three_faults_adds_up(job, capsys):
    """A kill, a hang and a lost slot: the ledger's phases are the history's, its pieces have no gap, its sums are the run's."""
    chaos = "kill:rank=1@step=12; hang:rank=2@step=24; slot-lost:rank=1@step=36"
    run = job("--nproc-per-node", "3", "--chaos", chaos, "train.py", "60").ok()
    events = run.events()
    goodput, history = account(events), fold(events)
    assert len(history.attempts) == 4
    assert round(sum(goodput.buckets.values()), 6) == round(goodput.slot_s, 6) == round(3 * goodput.wall_s, 6)
    [ledger] = fold_nodes(events).values()
    assert all(a.end == b.begin for a, b in pairwise(ledger.settled().pieces))
    assert goodput.wall_s == pytest.approx(events[-1].t - events[0].t, abs=2e-6)
    recoveries = [a.recovery for a in history.attempts if a.recovery]
    for phase, bucket in [("detect", Bucket.FAULT_DETECT), ("stop", Bucket.FAULT_STOP), ("rendezvous", Bucket.FAULT_RENDEZVOUS)]:
        assert goodput.buckets[bucket.value] == pytest.approx(3 * sum(getattr(r, phase) for r in recoveries), abs=1e-4)
    last = recoveries[-1]  # two slots went on
    assert goodput.groups()["fault"] == pytest.approx(
        3 * sum(r.total for r in recoveries[:-1])
        + 3 * (last.detect + last.stop + last.rendezvous)
        + 2 * (last.total - last.detect - last.stop - last.rendezvous),
        abs=1e-3,
    )
    redone = sum(a.steps_redone or 0 for a in history.attempts)
    assert redone > 0 and goodput.buckets["redone work"] > 0
    assert goodput.buckets["idle capacity"] > 0
    assert goodput.capacity_goodput < goodput.time_goodput < 1
    costs = {f"fault: {phase}": 3 * sum(getattr(r, phase) for r in recoveries) for phase in ("detect", "stop", "rendezvous")}
    faults = {name: spent for name, spent in goodput.buckets.items() if name.startswith("fault")} | costs
    faults |= {name: goodput.buckets[name] for name in ("redone work", "idle capacity")}
    assert first_cause(run, capsys).partition(": ")[0] == max(faults, key=lambda name: faults[name]).partition(": ")[0]
    assert goodput_main([str(run.run_dir)]) == 0
    words = capsys.readouterr().out
    assert "of the time" in words and "redone work" in words and "what to improve next" in words
    assert goodput_main([str(run.run_dir), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert sum(body["buckets"].values()) == pytest.approx(body["slot_s"]) and body["schema"] == 1
    assert goodput_main([str(run.run_dir), "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert sum(float(row["slot_seconds"]) for row in rows) == pytest.approx(goodput.slot_s)
    assert history_main([str(run.run_dir), "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["kind"] for row in rows] == ["signal", "hang", "slot-lost", "finished"]
    assert float(rows[1]["recovery_total"]) > 0


@pytest.mark.parametrize(
    ("word", "bucket"), [("data=0.05", Bucket.DATA_WAIT), ("save=0.05", Bucket.SAVE_STALL), ("eval=0.05", Bucket.EVAL)]
)
def test_the_right_cause_comes_first(job, capsys, word, bucket):
    """A slow loader, a slow disk or a long evaluation is the first thing that the run is told to improve, after its start."""
    run = job("--nproc-per-node", "2", "slow.py", "60", word).ok()
    goodput = account(run.events())
    assert first_cause(run, capsys).startswith(f"{bucket.value}: ")
    assert goodput.buckets[bucket.value] == pytest.approx(2 * 59 * 0.05, rel=0.25)


def test_a_straggler_comes_first(job, capsys):
    """A rank that computes longer than its peers is named as what to improve first; where all are as fast, none is."""
    run = job("--nproc-per-node", "3", "slow.py", "250", "compute=0.05").ok()
    goodput = account(run.events())
    assert first_cause(run, capsys).startswith("straggler: local rank 1 is slower than its peers")
    assert goodput.straggling_s == pytest.approx(3 * 250 * 0.05, rel=0.35)


def test_no_run_no_answer(tmp_path, capsys):
    """A run that is not there is said so in words, with status 2."""
    assert goodput_main([str(tmp_path / "none")]) == 2
    assert "no run is called" in capsys.readouterr().err
