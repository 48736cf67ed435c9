"""Joins the exporters that were asked for to a run's record, and stands between their faults and the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ...progress import Progress
from .. import events as ev
from ..events import Event
from ..journal import Journal, read_thinned
from ..options import RunConfig

if TYPE_CHECKING:
    from .scalars import Sink

Taker = Callable[[Event], None]


class Exporters:
    """Those that take each event as it is written."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.all_told: list[Taker] = []
        """They want to know what an earlier life of the run wrote, too."""
        self.from_now: list[Taker] = []
        self.look: Callable[[Sequence[Progress]], None] = lambda pages: None
        """Wants to know where the ranks are, between events too."""
        self._say = say

    def attach(self, journal: Journal) -> None:
        """Tell of the record so far, then of every event that is written."""
        if not self.all_told and not self.from_now:
            return
        told = list(read_thinned(journal.run_dir))
        for e in told:
            self._tell(self.all_told, e)
        for e in [e for e in told if isinstance(e, ev.RunStarted)][-1:]:
            self._tell(self.from_now, e)
        journal.on_write = self._written

    def _written(self, e: Event) -> None:
        self._tell(self.all_told, e)
        self._tell(self.from_now, e)

    def _tell(self, takers: list[Taker], e: Event) -> None:
        for taker in list(takers):
            try:
                taker(e)
            except Exception as error:  # the boundary between exporters and the run: a fault of theirs costs what they show, never the run
                takers.remove(taker)
                self._say(f"an exporter failed and is left out from now on: {type(error).__name__}: {error}")


@contextmanager
def exporting(config: RunConfig, status_on: int | None, say: Callable[[str], None]) -> Iterator[Exporters]:
    """The exporters that were asked for, working while the block runs. Raises UsageError if one of them cannot work.

    `status_on`: a terminal's descriptor, for the line at its bottom; None for no such line.
    """
    exporters = Exporters(say)
    with ExitStack() as stack:
        if status_on is not None:
            from .status import BottomRow, StatusLine

            status = StatusLine(BottomRow(status_on))
            stack.callback(status.close)
            exporters.all_told.append(status.add)
            exporters.look = status.look
        if config.metrics_at is not None:
            from .metrics import Metrics

            metrics = Metrics(*config.metrics_at)
            stack.callback(metrics.close)
            exporters.all_told.append(metrics.add)
            say(f"metrics at {metrics.address}")
        if config.on_event:
            from .alerts import Alerts

            alerts = Alerts(config.on_event, say)
            stack.callback(alerts.close)
            exporters.from_now.append(alerts.add)
        for name, sink in _sinks(config).items():
            from .scalars import Scalars

            scalars = Scalars(name, sink, say)
            stack.callback(scalars.close)
            exporters.from_now.append(scalars.add)
        yield exporters


def _sinks(config: RunConfig) -> dict[str, Callable[[str], Sink]]:
    """Where scalars are to go, by name; each is made with the run's id. Raises UsageError if a package is missing."""
    from .scalars import Mlflow, TensorBoard, need

    sinks: dict[str, Callable[[str], Sink]] = {}
    if config.tensorboard:
        need("tensorboard", "--tensorboard", "tensorboard")
        sinks["TensorBoard"] = lambda run_id: TensorBoard(config.tensorboard)
    if config.mlflow:
        need("mlflow", "--mlflow", "mlflow")
        sinks["MLflow"] = Mlflow
    return sinks
