"""The quarantine ledger of a node: which devices are set aside, by whom, why, until when. It survives runs; several jobs share it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import GoodrunError

SCHEMA = 1


class LedgerError(GoodrunError):
    """The ledger cannot be read or written: the machine's fault. A run goes on with what it knows itself."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One device's record. Times are seconds of wall time; `until` is None for good. A released device keeps its `offences`."""

    device: str
    name: str = ""
    out: bool = True
    since: float = 0.0
    until: float | None = None
    offences: int = 1
    failed_tests: int = 0
    """Re-tests that it has failed in a row."""
    reason: str = ""
    evidence: str = ""
    by: str = ""
    """The run, or the person, that set it aside or let it back in."""

    def due(self, now: float) -> bool:
        """Whether its term is over: it may be re-tested."""
        return self.out and self.until is not None and self.until <= now


class Ledger:
    """The file. Every change is made under a lock and replaces it as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_node(cls, env: Mapping[str, str]) -> Ledger:
        """This node's, beside the runs. Named after the node, for homes are shared. Raises LedgerError if there is no home."""
        from ..runs import runs_home

        try:
            return cls(runs_home(env).parent / "devices" / f"{socket.gethostname()}.json")
        except RuntimeError as e:
            raise LedgerError("there is no home directory to keep the quarantine ledger in; set GOODRUN_HOME") from e

    def read(self) -> dict[str, Entry]:
        """All entries by device. Raises LedgerError if the file is there and is not a ledger."""
        try:
            body = json.loads(self.path.read_bytes())
            if body["schema"] != SCHEMA:
                raise LedgerError(f"the quarantine ledger {self.path} is of another goodrun (schema {body['schema']!r})")
            entries = [Entry(**fields) for fields in body["devices"]]
            return {e.device: e for e in entries}
        except FileNotFoundError:
            return {}
        except OSError as e:
            raise LedgerError(f"cannot read the quarantine ledger {self.path}: {e.strerror}") from e
        except (ValueError, KeyError, TypeError) as e:
            raise LedgerError(f"the quarantine ledger {self.path} is damaged ({type(e).__name__}: {e})") from e

    def change(self, device: str, how: Callable[[Entry | None], Entry]) -> Entry:
        """Replace a device's entry by what `how` makes of it; returns the new one.

        A damaged ledger is put aside, beside the new one, for people to look at. Raises LedgerError if it cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                try:
                    entries = self.read()
                except LedgerError:
                    os.replace(self.path, self.path.with_suffix(".damaged"))
                    entries = {}
                entry = how(entries.get(device))
                self._write({**entries, device: entry})
                return entry
        except OSError as e:
            raise LedgerError(f"cannot write the quarantine ledger {self.path}: {e.strerror}") from e

    def release(self, device: str, now: float, by: str) -> Entry:
        """Let a device back in; it keeps its offences. Raises LedgerError if it is not set aside, or the file cannot be written."""

        def back(entry: Entry | None) -> Entry:
            if entry is None or not entry.out:
                raise LedgerError(f"{device} is not set aside: there is nothing to release")
            return replace(entry, out=False, since=now, until=None, failed_tests=0, by=by)

        return self.change(device, back)

    def _write(self, entries: Mapping[str, Entry]) -> None:
        fresh = self.path.with_suffix(f".{os.getpid()}.new")
        try:
            with open(fresh, "x", encoding="utf-8") as f:
                json.dump({"schema": SCHEMA, "devices": [asdict(e) for e in entries.values()]}, f, indent=1)
                f.flush()
                os.fsync(f.fileno())
            os.replace(fresh, self.path)
        finally:
            with suppress(FileNotFoundError):
                fresh.unlink()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # a file of its own: the ledger is replaced, and a lock on it would be one on the old file
        fd = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with suppress(OSError):  # a file system without locks: the replacement is still atomic
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
