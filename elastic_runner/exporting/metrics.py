"""The state of a run in Prometheus' text format, and the small server that hands it out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..dashboard.board import Board
from ..errors import UsageError
from ..events import Event

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("starting", "training", "recovering", "stopping", "succeeded", "failed", "stopped")


class Metrics:
    """Keeps a board up to date for whoever asks over HTTP; the run never waits for an asker."""

    def __init__(self, host: str, port: int) -> None:
        """Listen at once. Raises UsageError if the port cannot be had."""
        self._board, self._lock = Board(), threading.Lock()
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            """Answers GET /metrics."""

            timeout = 10.0

            def do_GET(self) -> None:
                """One scrape."""
                if self.path.partition("?")[0] not in ("/metrics", "/"):
                    self.send_error(404, "the metrics are at /metrics")
                    return
                body = metrics.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing on the terminal."""

        try:
            self._server = _Server((host, port), Handler)
        except OSError as e:
            raise UsageError(f"--metrics-port {host}:{port} cannot be listened on: {e.strerror}; name another port, or 0 for any") from e
        self._thread = threading.Thread(target=self._server.serve_forever, name="goodrun-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where the metrics are."""
        host, port = self._server.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}/metrics"

    def add(self, e: Event) -> None:
        """Take an event of the run."""
        with self._lock:
            self._board.add(e)

    def text(self) -> str:
        """All metrics as they stand."""
        with self._lock:
            return exposition(self._board)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """An asker that went away is none of the run's business."""


def exposition(board: Board) -> str:
    """The metrics of a board as Prometheus reads them."""
    return "".join(_lines(board))


def _lines(board: Board) -> Iterator[str]:
    goodput, (saved, durable), ranks = board.goodput, board.checkpoints, board.ranks()
    run = board.run
    yield from _metric(
        "info", "gauge", "The run, by its labels.", [({"run_id": run.run_id, "script": run.script, "version": run.version}, 1)]
    )
    yield from _metric("state", "gauge", "1 for what the run is at.", [({"state": s}, int(s == board.state)) for s in _STATES])
    yield from _metric("world_size", "gauge", "Ranks of the whole job.", [({}, board.world_size)])
    yield from _metric("step", "gauge", "The furthest step of this attempt.", [({}, max(board.step, 0))])
    yield from _metric("restarts_total", "counter", "Restarts so far.", [({}, board.history.restarts)])
    yield from _metric("wall_seconds", "gauge", "How long the run has been at work.", [({}, goodput.wall_s)])
    yield from _metric("goodput_ratio", "gauge", "Share of the time in steps that were kept.", [({}, goodput.time_goodput)])
    yield from _metric("capacity_goodput_ratio", "gauge", "The same of the capacity asked for.", [({}, goodput.capacity_goodput)])
    windows = [({"seconds": str(w.seconds)}, w.time_goodput) for w in goodput.windows]
    yield from _metric("window_goodput_ratio", "gauge", "Goodput of the last so many seconds.", windows)
    # a gauge, for a fault takes productive seconds back
    buckets = [({"bucket": name}, spent) for name, spent in goodput.buckets.items()]
    yield from _metric("slot_seconds", "gauge", "Where every slot-second went.", buckets)
    yield from _metric("checkpoint_saved_step", "gauge", "The newest snapshot's step, -1 if none.", [({}, saved)])
    yield from _metric("checkpoint_durable_step", "gauge", "The newest durable checkpoint's step, -1 if none.", [({}, durable)])
    labels = [{"rank": str(r.rank), "slot": str(r.slot)} for r in ranks]
    for name, text, values in (
        ("rank_step", "The rank's newest step.", [r.step for r in ranks]),
        ("rank_step_seconds", "How long its last step took.", [r.step_s for r in ranks]),
        ("rank_fetch_seconds", "How long it has waited for data in this attempt.", [r.data_wait_s for r in ranks]),
        ("rank_silent_seconds", "How long ago it last beat, when it was last looked at.", [r.silent_s for r in ranks]),
    ):
        yield from _metric(name, "gauge", text, list(zip(labels, values, strict=True)))


def _metric(name: str, kind: str, text: str, samples: list[tuple[dict[str, str], float]]) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP goodrun_{name} {text}\n# TYPE goodrun_{name} {kind}\n"
    for labels, value in samples:
        inside = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())
        yield f"goodrun_{name}{f'{{{inside}}}' if inside else ''} {float(value)!r}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
