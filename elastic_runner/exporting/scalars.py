"""A run's numbers as scalars over its steps, for TensorBoard and MLflow: written by a thread, and never able to hold the run up."""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Protocol

from .. import events as ev
from ..dashboard.board import Board
from ..errors import UsageError
from ..events import Event

_BACKLOG = 4096


class Sink(Protocol):
    """Where scalars go. Its methods are called from one thread, and may raise anything."""

    def write(self, values: dict[str, float], step: int, t: float) -> None:
        """Keep `values` of `step`, at `t` seconds since the epoch."""

    def close(self) -> None:
        """Everything is to be where it belongs."""


class Fold:
    """What each report of the ranks adds, by name: the numbers of this node."""

    def __init__(self) -> None:
        self._board = Board()
        self._before = ev.RankProgress()

    def add(self, e: Event) -> dict[str, float]:
        """The scalars that an event brings; most bring none."""
        self._board.add(e)
        if isinstance(e, ev.AttemptStarted):
            self._before = ev.RankProgress()  # what ranks report counts from the start of an attempt
        if not isinstance(e, ev.RankProgress) or max(e.steps, default=-1) < 0:
            return {}
        before, self._before = self._before, e
        goodput = self._board.goodput
        values = {
            "goodput/time": goodput.time_goodput,
            "goodput/capacity": goodput.capacity_goodput,
            "world_size": float(self._board.world_size),
            "restarts": float(self._board.history.restarts),
            "checkpoint/saved_step": float(e.saved_step),
            "checkpoint/durable_step": float(e.durable_step),
        }
        if e.loss is not None:
            values["loss"] = e.loss
        for i, step in enumerate(e.steps):
            rank = f"rank{self._board.first_rank + i}"
            if i < len(e.last_step_s):
                values[f"step_seconds/{rank}"] = e.last_step_s[i]
            if i < len(before.steps) and step > before.steps[i]:  # not the start's waits
                done = step - before.steps[i]
                values[f"fetch_seconds/{rank}"] = _grown(e.data_wait_s, before.data_wait_s, i) / done
                values[f"save_stall_seconds/{rank}"] = _grown(e.save_stall_s, before.save_stall_s, i) / done
        return {f"goodrun/{name}": value for name, value in values.items()}


def _grown(now: Sequence[float], before: Sequence[float], i: int) -> float:
    return max(now[i] - before[i], 0.0) if i < len(now) and i < len(before) else 0.0


class Scalars:
    """Hands the scalars of a run to a sink, in a thread that also makes the sink."""

    def __init__(self, name: str, sink: Callable[[str], Sink], say: Callable[[str], None], *, limit_s: float = 10.0) -> None:
        """`sink` makes one for a run's id; `limit_s`: how long `close` waits for what is on its way."""
        self._name, self._sink, self._say, self._limit_s = name, sink, say, limit_s
        self._waiting: queue.Queue[Event | None] = queue.Queue(_BACKLOG)
        self._thread = threading.Thread(target=self._work, name=f"goodrun-{name}", daemon=True)
        self._thread.start()

    def add(self, e: Event) -> None:
        """Hand an event over; while the sink is far behind, events are dropped rather than waited for."""
        with suppress(queue.Full):
            self._waiting.put_nowait(e)

    def close(self) -> None:
        """Let the sink have what is waiting, for `limit_s` at most."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=self._limit_s)
        self._thread.join(self._limit_s)
        if self._thread.is_alive():
            self._say(f"{self._name} took longer than {self._limit_s:g} s: its newest numbers are lost")

    def _work(self) -> None:
        try:
            sink, fold = None, Fold()
            while (e := self._waiting.get()) is not None:
                values = fold.add(e)
                if isinstance(e, ev.RunStarted):
                    sink = self._sink(e.run_id)
                elif values and sink is not None and isinstance(e, ev.RankProgress):
                    sink.write(values, max(e.steps), _epoch_s(e.wall))
            if sink is not None:
                sink.close()
        except Exception as error:  # the boundary to a library and the server behind it: their faults cost their numbers, never the run
            self._say(f"{self._name} failed and gets no more numbers: {type(error).__name__}: {error}")


def _epoch_s(wall: str) -> float:
    try:
        return datetime.fromisoformat(wall).timestamp()
    except ValueError:
        return time.time()


def need(package: str, option: str, extra: str) -> None:
    """Raises UsageError, with what to install, where `package` is missing."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{option} needs the package {package}: pip install 'goodrun[{extra}]'")


class TensorBoard:
    """An event file in `directory`."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory)

    def write(self, values: dict[str, float], step: int, t: float) -> None:
        """One point of each; on disk within seconds."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=t)
        self._writer.flush()

    def close(self) -> None:
        """The file is whole."""
        self._writer.close()


class Mlflow:
    """Metrics of one MLflow run: that of MLFLOW_RUN_ID, which stays open, else a new one. Where to: MLFLOW_TRACKING_URI and the like."""

    def __init__(self, name: str) -> None:
        """`name`: of a new run."""
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        self._ours = "MLFLOW_RUN_ID" not in os.environ
        self._run = self._new(name) if self._ours else os.environ["MLFLOW_RUN_ID"]

    def _new(self, name: str) -> str:
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(wanted)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or (found.experiment_id if found else self._client.create_experiment(wanted))
        run: str = self._client.create_run(experiment, run_name=name, tags={"goodrun.run": name}).info.run_id
        return run

    def write(self, values: dict[str, float], step: int, t: float) -> None:
        """One request for all of them."""
        self._client.log_batch(self._run, metrics=[self._metric(name, value, int(1000 * t), step) for name, value in values.items()])

    def close(self) -> None:
        """A run of ours is over; another's goes on."""
        if self._ours:
            self._client.set_terminated(self._run)
