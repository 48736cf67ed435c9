"""A run's numbers reach TensorBoard and MLflow, as the real libraries read them back."""

from __future__ import annotations

import threading
import warnings

import pytest

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.errors import UsageError
from goodrun.elastic_runner.exporting.scalars import Fold, Scalars, need

STORY = [
    ev.RunStarted(t=1.0, run_id="r1", slots=(0, 1)),
    ev.AttemptStarted(t=2.0, world_size=2, slots=(0, 1)),
    ev.RankProgress(t=5.0, steps=(1, 1), data_wait_s=(1.0, 1.0), save_stall_s=(0.0, 0.0), last_step_s=(0.5, 0.5), step_t=5.0),
    ev.FirstStep(t=5.0, step=1, first_step_t=5.0),
    ev.RankProgress(
        t=9.0,
        steps=(5, 5),
        data_wait_s=(1.4, 3.0),
        save_stall_s=(0.8, 0.8),
        last_step_s=(0.6, 0.7),
        step_t=9.0,
        durable_step=3,
        loss=0.75,
    ),
]


def test_what_is_told_of_a_run():
    """Waits are per step and by rank, since the report before; the start's own waits are in none."""
    fold = Fold()
    told = [fold.add(e) for e in STORY]
    assert [bool(values) for values in told] == [False, False, True, False, True]
    assert not any("fetch" in name for name in told[2])
    assert told[4] == pytest.approx(
        {
            "goodrun/goodput/time": 0.15,
            "goodrun/goodput/capacity": 0.15,
            "goodrun/loss": 0.75,
            "goodrun/world_size": 2,
            "goodrun/restarts": 0,
            "goodrun/checkpoint/saved_step": -1,
            "goodrun/checkpoint/durable_step": 3,
            "goodrun/step_seconds/rank0": 0.6,
            "goodrun/step_seconds/rank1": 0.7,
            "goodrun/fetch_seconds/rank0": 0.1,
            "goodrun/fetch_seconds/rank1": 0.5,
            "goodrun/save_stall_seconds/rank0": 0.2,
            "goodrun/save_stall_seconds/rank1": 0.2,
        }
    )


def test_a_sink_that_fails_or_hangs_costs_its_numbers_alone():
    """What the library raises is said once, and nothing waits for it; one that hangs is left behind when its time is up."""
    said: list[str] = []

    def broken(run_id):
        raise ConnectionError("no server")

    scalars = Scalars("MLflow", broken, said.append)
    for e in STORY * 3000:
        scalars.add(e)
    scalars.close()
    assert said == ["MLflow failed and gets no more numbers: ConnectionError: no server"]

    never = threading.Event()
    hanging = Scalars("MLflow", lambda run_id: never.wait(), said.append, limit_s=0.1)
    hanging.add(STORY[0])
    hanging.close()
    never.set()
    assert said[1:] == ["MLflow took longer than 0.1 s: its newest numbers are lost"]


def test_a_missing_package_is_named():
    """Before anything is started."""
    with pytest.raises(UsageError, match=r"--mlflow needs the package no_such_thing: pip install 'goodrun\[mlflow\]'"):
        need("no_such_thing", "--mlflow", "mlflow")


def test_a_run_with_both(job, monkeypatch):
    """Both libraries read back what a run with a kill in it wrote: every rank's waits, over its steps; MLflow's run is finished."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("mlflow")
    for name in ENV:
        monkeypatch.setenv(name, ENV[name])
    j = job(*("--nproc-per-node", 2, "--tensorboard", "tb", "--mlflow", "--chaos", "kill:rank=1@step=8", "train.py", 20), env=ENV).ok()
    assert "gets no more numbers" not in j.err
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        from mlflow.tracking import MlflowClient
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(j.where / "tb"))
        board.Reload()
        client = MlflowClient(f"file:{j.where}/mlruns")
        (run,) = client.search_runs(["0"])
        logged = client.get_metric_history(run.info.run_id, "goodrun/step_seconds/rank1")
    assert "goodrun/step_seconds/rank0" in board.Tags()["scalars"]
    assert board.Scalars("goodrun/restarts")[-1].value == 1
    assert board.Scalars("goodrun/checkpoint/durable_step")[-1].step == 20
    assert run.info.status == "FINISHED" and run.info.run_name == j.events(ev.RunStarted)[0].run_id
    assert logged[-1].step == 20


ENV = {"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
