"""What the kernel knows of a process: its state, its signs of work, its session; and how a whole session is ended."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

_WRITES = (64, 66) if platform.machine() in ("aarch64", "riscv64") else (1, 20)
"""Numbers of write and writev."""
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Signs:
    """A process's signs of work at one moment. Counters only ever grow while the process lives."""

    state: str
    """One letter as in /proc: R runs or wants to, S sleeps, D waits in the kernel, T stopped, t traced, Z dead but not reaped."""
    cpu_s: float
    """CPU seconds of the process and everything alive below it: an evaluation may be a shell that runs a program."""
    switches: int
    """How often the main thread gave up the CPU or lost it: a thread that sleeps for good does neither."""
    io_bytes: int
    """Bytes read and written through system calls."""


def state(pid: int) -> str:
    """The process's state letter; "X" if it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else "X"


def signs(pid: int) -> Signs:
    """Read a process's signs of work; a process that is gone shows none, in state "X"."""
    fields = _stat(pid)
    if not fields:
        return Signs(state="X", cpu_s=0.0, switches=0, io_bytes=0)
    cpu = sum(int(f[11]) + int(f[12]) for f in (fields, *(_stat(c) for c in _descendants(pid))) if f)
    status, io = _pairs(f"/proc/{pid}/status"), _pairs(f"/proc/{pid}/io")
    return Signs(
        state=fields[0],
        cpu_s=cpu * _TICK_S,
        switches=int(status.get("voluntary_ctxt_switches", 0)) + int(status.get("nonvoluntary_ctxt_switches", 0)),
        io_bytes=int(io.get("rchar", 0)) + int(io.get("wchar", 0)),
    )


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    found, parents = [], [pid]
    while parents:
        below = _children(parents.pop())
        found += below
        parents += below
    return found


def _children(pid: int) -> list[int]:
    """Direct children, whichever thread started them."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as f:
                found += map(int, f.read().split())
    return found


def _pairs(path: str) -> dict[str, str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return {k: v.strip() for k, _, v in (line.partition(":") for line in f)}
    except OSError:
        return {}


def writes_to(pid: int) -> str:
    """ "stdout" or "stderr" if the process's main thread stands in a write to it, else ""."""
    with suppress(OSError, IndexError, ValueError):
        with open(f"/proc/{pid}/syscall", encoding="ascii") as f:
            number, fd = f.read().split()[:2]
        if int(number) in _WRITES:
            return {1: "stdout", 2: "stderr"}.get(int(fd, 16), "")
    return ""


class Adopted:
    """A child that somebody else forked for us: what is used of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Reap it; returns its exit status, negative if a signal ended it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def be_subreaper(on: bool) -> None:
    """Whether orphans among this process's descendants become its children, instead of the system's."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def exit_code(pid: int) -> int | None:
    """The exit status of a child that has ended, without reaping it (negative: killed by that signal); None while it lives.

    Not reaping keeps the pid, and so the session's id, from being used again until the session has been cleared.
    """
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def session_members(sid: int) -> list[int]:
    """Every living process of session `sid`, its leader included."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields and int(fields[3]) == sid and fields[0] not in "ZX":
                found.append(int(name))
    return found


def kill_session(sid: int, *, within_s: float = 1.0) -> None:
    """SIGKILL everything in session `sid`, whose leader must not have been reaped yet; returns when it is gone or time is up.

    Catches helpers that made process groups of their own; one that made its own session has left the job on purpose.
    """
    end = time.monotonic() + within_s
    send_group(sid, signal.SIGKILL)
    while members := session_members(sid):
        for pid in members:
            send(pid, signal.SIGKILL)
        if time.monotonic() > end:
            return
        time.sleep(0.002)  # the kernel is taking them apart; there is no event for a grandchild's end


def send(pid: int, sig: int) -> None:
    """Signal one process, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, sig)


def send_main_thread(pid: int, sig: int) -> None:
    """Signal a process's main thread: of a stopped process any other might get it first."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # a name of glibc's since 2.30
    if tgkill is None:
        send(pid, sig)
    else:
        tgkill(pid, pid, int(sig))


def send_group(pgid: int, sig: int) -> None:
    """Signal a process group, if it still exists."""
    with suppress(ProcessLookupError):
        os.killpg(pgid, sig)
