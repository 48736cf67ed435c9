"""The ranks of one attempt on this node as processes: started with their pages, watched by descriptor, stopped with all they started."""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SubprocessContext

from .. import progress
from . import processes, seams
from .bootstrap import STACK_FILE_VARIABLE, STACK_SIGNAL
from .nursery import Nursery, instrumented

_TIED = Path(__file__).parent / "tied.py"


@dataclass(kw_only=True)
class Rank:
    """One worker process. `local` is its LOCAL_RANK, `rank` its RANK, `slot` the device slot it is bound to."""

    local: int
    rank: int
    slot: int
    proc: subprocess.Popen[bytes] | processes.Adopted
    pidfd: int
    page: progress.Page
    stack_file: Path
    error_file: str
    stderr_file: str
    warm: bool = False
    held: int = 0
    """Bytes it held in memory when last looked at."""
    code: int | None = None
    """The exit status once it has ended; negative is a signal."""
    ended_t: float = 0.0

    @property
    def pid(self) -> int:
        """The process id, which stays ours until the rank is reaped."""
        return self.proc.pid

    def look(self) -> bool:
        """Whether the rank has ended, learning its exit status without reaping it."""
        if self.code is None:
            self.code = processes.exit_code(self.pid)
            if self.code is not None:
                self.ended_t = time.monotonic()
        return self.code is not None

    def release(self) -> None:
        """Reap the process and let its descriptors and page go."""
        self.proc.wait()
        if self.code is None:
            self.code = self.proc.returncode
        os.close(self.pidfd)
        self.page.close()


@dataclass(frozen=True, kw_only=True)
class Spawn:
    """What the supervisor adds to torch's own description of an attempt. `slots[i]` is the slot of local rank i."""

    generation: int
    slots: tuple[int, ...]
    stack_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES is to be, one entry per local rank; empty leaves it as torchrun does."""
    virtual_local_rank: bool = False
    nursery: Nursery | None = None
    """Where warm workers wait; None starts all of them cold."""
    script_is_python: bool = True


class GenerationLogs(LogsSpecs):
    """The user's log layout, with one folder per generation: torchrun counts restarts and re-uses the folder of a membership change."""

    def __init__(self, inner: LogsSpecs, generation: int) -> None:
        self._inner = inner
        self._generation = generation

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The inner layout's answer for this generation."""
        counted = {k: {**v, "TORCHELASTIC_RESTART_COUNT": str(self._generation)} for k, v in envs.items()}
        answer = self._inner.reify(counted)
        for local, env in envs.items():  # layouts add variables, the error file's among them
            env.update({k: v for k, v in counted[local].items() if k not in env})
        return answer

    @property
    def root_log_dir(self) -> str:
        """Where the inner layout puts its folders."""
        return self._inner.root_log_dir or ""


class WorkerContext(SubprocessContext):
    """torch's process context with pages, pidfds, and an end that takes helpers along."""

    def __init__(self, *, spawn: Spawn, logs_specs: LogsSpecs, **kwargs: Any) -> None:
        super().__init__(logs_specs=GenerationLogs(logs_specs, spawn.generation), **kwargs)
        self.spawn = spawn
        self.ranks: list[Rank] = []

    def warm_up(self) -> None:
        """Have warm processes ready for `start`, each costing what it costs to wait for torch's imports once; see Nursery."""
        if self.spawn.nursery is not None and (command := self.common_command()):
            self.spawn.nursery.prepare(command, self.nprocs)

    def start(self) -> None:
        """Start the ranks and the tees. Signals are the supervisor's business: torch's own handlers are not installed."""
        self._start()
        for tail in seams.tails(self):
            tail.start()

    def _start(self) -> None:
        self.spawn.stack_dir.mkdir(parents=True, exist_ok=True)
        for local in range(self.nprocs):
            self.ranks.append(self._spawn(local))

    def _spawn(self, local: int) -> Rank:
        env = {**os.environ, **self.envs[local], **self.spawn.env, "GOODRUN_SLOT": str(self.spawn.slots[local])}
        if self.spawn.devices:
            env["CUDA_VISIBLE_DEVICES"] = self.spawn.devices[local] if self.spawn.virtual_local_rank else ",".join(self.spawn.devices)
        stack_file = self.spawn.stack_dir / f"attempt_{self.spawn.generation}_rank_{env['RANK']}.stack"
        page, page_fd = progress.Page.create()
        command = self.command(local)
        if not self.spawn.script_is_python:
            command = (sys.executable, "-S", "-E", str(_TIED), str(os.getpid()), *command)
        env[STACK_FILE_VARIABLE] = str(stack_file)
        with ExitStack() as files:
            out, err = (self._log(files, path[local]) for path in (self.stdouts, self.stderrs))
            files.callback(os.close, page_fd)
            fds = [f.fileno() if f else None for f in (out, err)]
            kept_warm = self.spawn.nursery.go(command, env, page_fd, *fds) if self.spawn.nursery else None
            if self.spawn.script_is_python:
                env = instrumented({**env, progress.PAGE_FD_VARIABLE: str(page_fd)})
            proc = kept_warm or subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True, pass_fds=[page_fd])
        return Rank(
            local=local,
            rank=int(env["RANK"]),
            slot=self.spawn.slots[local],
            proc=proc,
            pidfd=os.pidfd_open(proc.pid),
            page=page,
            stack_file=stack_file,
            error_file=self.error_files[local],
            stderr_file=self.stderrs[local],
            warm=kept_warm is not None,
        )

    def command(self, local: int) -> tuple[str, ...]:
        """The words that start a local rank."""
        command = (str(self.entrypoint), *(str(a) for a in self.args[local]))
        numa = getattr(self, "_numa_options", None)
        if numa is not None:
            from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as bind

            command = bind(command, gpu_index=local, numa_options=numa)
        return tuple(command)

    def common_command(self) -> tuple[str, ...]:
        """The words that start every rank; empty where they differ: ${local_rank} in the arguments, or a NUMA binding."""
        commands = {self.command(local) for local in range(self.nprocs)}
        return commands.pop() if len(commands) == 1 else ()

    @staticmethod
    def _log(files: ExitStack, path: str) -> IO[bytes] | None:
        return files.enter_context(open(path, "wb")) if path else None

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return {r.local: r.pid for r in self.ranks}

    def ask(self, sig: int) -> None:
        """Pass a signal on: to the rank itself where it is Python, to its whole group where it is some other program.

        torchrun signals the group, and so ends the data-loading helpers of a rank that is still saving.
        """
        for r in self.ranks:
            if not r.look():
                (processes.send if self.spawn.script_is_python else processes.send_group)(r.pid, sig)

    def wait_ended(self, timeout_s: float, wake: int | None = None) -> bool:
        """Wait until every rank has ended; False when time is up first, or when descriptor `wake` became readable."""
        end = time.monotonic() + timeout_s
        while waiting := [r for r in self.ranks if not r.look()]:
            left = end - time.monotonic()
            if left <= 0:
                return False
            poll = select.poll()
            for r in waiting:
                poll.register(r.pidfd, select.POLLIN)
            if wake is not None:
                poll.register(wake, select.POLLIN)
            if any(fd == wake for fd, _ in poll.poll(left * 1000)):
                return False
        return True

    def end(self) -> list[Rank]:
        """Kill what is left of every rank and its helpers, and reap; returns the ranks that had to be killed. Idempotent."""
        killed = [r for r in self.ranks if not r.look()]
        for r in self.ranks:
            processes.send_group(r.pid, signal.SIGKILL)
        for r in self.ranks:
            processes.kill_session(r.pid)
            r.release()
        self.ranks = []
        return killed

    def stacks(self, timeout_s: float = 0.5) -> dict[int, tuple[str, ...]]:
        """Every living rank's Python stack by global rank, innermost frame first; a stopped rank is set going for it."""
        asked = {r.rank: r for r in self.ranks if not r.look() and self.spawn.script_is_python and r.page.read().marks[progress.Mark.BOOT]}
        before = {rank: _size(r.stack_file) for rank, r in asked.items()}
        stopped = [r for r in asked.values() if processes.state(r.pid) == "T"]
        for r in asked.values():
            processes.send_main_thread(r.pid, STACK_SIGNAL)
        for r in stopped:
            processes.send(r.pid, signal.SIGCONT)
            _await(functools.partial(_grown, r.stack_file, before[r.rank]), 0.2)
            processes.send(r.pid, signal.SIGSTOP)  # it was set going for the handler alone
        _await(lambda: not any(_unfinished(r.stack_file, before[rank]) for rank, r in asked.items()), timeout_s)
        return {rank: parse_stack(_tail(r.stack_file, before[rank])) for rank, r in asked.items()}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if self.ranks:
            self.ask(death_sig)
            self.wait_ended(timeout)
            self.end()


def parse_stack(text: str) -> tuple[str, ...]:
    """faulthandler's frames (`File "x.py", line 3 in f`), innermost first."""
    return tuple(line.strip() for line in text.splitlines() if line.lstrip().startswith("File "))


def _await(test: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a dump: it is written by a signal handler in another process, and nothing announces its end."""
    end = time.monotonic() + timeout_s
    while not test() and time.monotonic() < end:
        time.sleep(0.001)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _grown(path: Path, offset: int) -> bool:
    return _size(path) > offset


def _tail(path: Path, offset: int) -> str:
    if not path.exists():
        return ""
    with open(path, encoding="utf-8", errors="replace") as f:
        f.seek(offset)
        return f.read()


def _unfinished(path: Path, offset: int) -> bool:
    return "<module>" not in _tail(path, offset)
