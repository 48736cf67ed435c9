"""What leaves a run: metrics that Prometheus can read, a command for each event; and neither can hurt the run."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.dashboard.board import Board
from goodrun.elastic_runner.errors import UsageError
from goodrun.elastic_runner.exporting.alerts import Alerts
from goodrun.elastic_runner.exporting.attach import Exporters
from goodrun.elastic_runner.exporting.metrics import Metrics, exposition
from goodrun.elastic_runner.journal import Journal

STORY = [
    ev.RunStarted(t=1, run_id='a"b\\c\nd', script="train.py", slots=(0, 1), node="n"),
    ev.AttemptStarted(t=2, world_size=2, slots=(0, 1), node="n"),
    ev.FirstStep(t=5, step=1, first_step_t=5, node="n"),
    ev.RankProgress(t=9, steps=(5, 5), data_wait_s=(1.0, 0.5), last_step_s=(1.0, 1.1), step_t=9, durable_step=4, saved_step=5, node="n"),
]


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    served = Metrics("127.0.0.1", 0)
    yield served
    served.close()


def families(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples by name, as Prometheus' own parser reads them."""
    return {s.name: [(x.labels, x.value) for x in f.samples] for f in text_string_to_metric_families(text) for s in f.samples}


def test_prometheus_reads_them(metrics: Metrics) -> None:
    """Over HTTP, by its own parser: names by convention with help and type, labels escaped, values those of the ledger."""
    for e in STORY:
        metrics.add(e)
    with urllib.request.urlopen(metrics.address, timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    found = families(text)
    assert found["goodrun_info"][0][0]["run_id"] == 'a"b\\c\nd'
    assert found["goodrun_world_size"] == [({}, 2.0)]
    assert found["goodrun_step"] == [({}, 5.0)]
    assert found["goodrun_goodput_ratio"][0][1] == pytest.approx(3.0 / 8)
    assert sum(value for _, value in found["goodrun_slot_seconds"]) == pytest.approx(16.0)
    assert [value for labels, value in found["goodrun_rank_fetch_seconds"] if labels["rank"] == "0"] == [1.0]
    assert [labels["state"] for labels, value in found["goodrun_state"] if value] == ["training"]
    assert found["goodrun_restarts_total"] == [({}, 0.0)]
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("goodrun_") and family.documentation and family.type != "unknown"
        assert len({tuple(sorted(s.labels.items())) for s in family.samples}) == len(family.samples)


@pytest.mark.parametrize("n", range(5))
def test_metrics_of_a_run_that_has_just_begun(n: int) -> None:
    """From the first event on there is something to read, and never anything that is no number."""
    found = families(exposition(Board().extend(STORY[:n])))
    assert all(value == value for samples in found.values() for _, value in samples)


def test_it_listens_on_loopback_alone(metrics: Metrics) -> None:
    """Nobody from elsewhere can ask unless a host is named; a port that is taken is said so in words."""
    assert metrics.address.startswith("http://127.0.0.1:")
    port = int(metrics.address.rpartition(":")[2].partition("/")[0])
    with pytest.raises(UsageError, match="name another port"):
        Metrics("127.0.0.1", port)
    other = next(
        (info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET) if not str(info[4][0]).startswith("127.")),
        None,
    )
    if other is not None:
        with pytest.raises(OSError), socket.create_connection((str(other), port), timeout=2):
            pass


def test_an_unknown_path_is_refused(metrics: Metrics) -> None:
    """Only the metrics are there."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(metrics.address.replace("/metrics", "/etc/passwd"), timeout=5)
    assert refused.value.code == 404
    refused.value.close()


def test_each_event_goes_to_the_command(tmp_path: Path) -> None:
    """The command gets one JSON line for each event, in order, progress left out; closing lets it finish."""
    said: list[str] = []
    alerts = Alerts(f"cat >> {tmp_path / 'events'}", said.append)
    for e in STORY:
        alerts.add(e)
    alerts.close()
    told = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [e["event"] for e in told] == ["run_started", "attempt_started", "first_step"]
    assert told[1]["slots"] == [0, 1]
    assert said == []


@pytest.mark.parametrize(("command", "words"), [("sleep 1000", "took longer than 0.3 s and was killed"), ("exit 3", "ended with status 3")])
def test_a_bad_command_is_said_once(command: str, words: str) -> None:
    """A command that hangs is killed, one that fails is noted; once, and nothing waits for it."""
    said: list[str] = []
    alerts = Alerts(command, said.append, limit_s=0.3)
    before = time.monotonic()
    for _ in range(1000):
        alerts.add(STORY[0])
    assert time.monotonic() - before < 0.3
    alerts.close()
    assert len(said) == 1
    assert words in said[0] or "events are dropped" in said[0]


def test_an_exporter_that_fails_is_left_out(tmp_path: Path) -> None:
    """An exporter's own fault ends the exporter: the record goes on, and so do the others."""
    said: list[str] = []
    seen: list[str] = []

    def broken(e: ev.Event) -> None:
        raise RuntimeError("no")

    exporters = Exporters(said.append)
    exporters.all_told += [broken, lambda e: seen.append(e.name)]
    journal = Journal(tmp_path)
    journal.write(STORY[0])
    exporters.attach(journal)
    journal.write(ev.Notice(text="on"))
    journal.close()
    assert seen == ["run_started", "notice"]
    assert len(said) == 1 and "left out" in said[0]


def test_a_run_with_both(job, tmp_path):  # type: ignore[no-untyped-def]
    """A real run serves its metrics while it trains and tells the command of its whole life; a slow command does not slow it."""
    told = tmp_path / "told"
    run = job(
        "--nproc-per-node",
        "2",
        "--metrics-port",
        "0",
        "--on-event",
        f"cat >> {told}; sleep 0.2",
        "--chaos",
        "kill:rank=1@step=40",
        "slow.py",
        "100",
        "data=0.05",
    )
    address = run.until(
        lambda: next((w for line in run.err.splitlines() if "metrics at" in line for w in line.split() if "http" in w), None)
    )

    def scraped() -> dict[str, list[tuple[dict[str, str], float]]]:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return families(answer.read().decode())

    run.until(lambda: scraped()["goodrun_step"][0][1] >= 1, timeout=60)
    assert scraped()["goodrun_world_size"] == [({}, 2.0)]
    run.ok()
    names = [json.loads(line)["event"] for line in told.read_text().splitlines()]
    assert names[0] == "run_started" and names[-1] == "run_ended" and "failed" in names


def test_options_that_cannot_work(job):  # type: ignore[no-untyped-def]
    """A port that is none is refused before anything starts, with status 2."""
    run = job("--metrics-port", "many", "train.py", "1")
    assert run.wait() == 2
    assert "is neither a port nor HOST:PORT" in run.err
