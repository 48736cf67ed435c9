"""The worker's side of warm start: import once what every rank needs, fork ranks from there, hold each still until told to go.

All of them are `python -u train.py …` itself, held up in its sitecustomize: the template imports and forks, a forked standby waits. When a
standby goes on it leaves sitecustomize as any interpreter does, and the script begins. Standard library only at the top; runs inside the
template and its standbys.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .. import progress
from .tied import die_with_parent

VARIABLE = "GOODRUN_TEMPLATE_FD"
PRELOAD_VARIABLE = "GOODRUN_PRELOAD"
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "torch.utils.data", "torch.distributed.checkpoint")
"""torch._dynamo is what the first optimizer or DDP object imports behind the script's back: half of a start's seconds."""
_MAKES_FOLDER = "torch.distributed.nn.jit.instantiator"
MOST_AT_ONCE = 64
"""Standbys that one request may ask for; the kernel passes at most 253 descriptors in a message."""


def ask_for(template: socket.socket, standbys: list[socket.socket]) -> None:
    """The supervisor's side: have a standby forked for each channel. Raises OSError if the template is gone."""
    fds = array.array("i", [s.fileno() for s in standbys])
    template.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


def send_go(channel: socket.socket, env: Mapping[str, str], page: int, out: int | None, err: int | None) -> None:
    """The supervisor's side: let a standby go on as the rank that `env` describes. Raises OSError if it is gone."""
    kinds, fds = ["page"], [page]
    for kind, fd in (("out", out), ("err", err)):
        if fd is not None:
            kinds.append(kind)
            fds.append(fd)
    body = json.dumps({"env": dict(env), "fds": kinds}).encode()
    channel.sendmsg([len(body).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    channel.sendall(body)


def serve(parent: int) -> None:
    """Import, say what came of it, and fork on request; returns in a standby that was told which rank it is, and nowhere else."""
    try:
        # schedulers send these to every process of a job; they mean something to ranks alone
        before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGUSR1, signal.SIGUSR2)}
        template = socket.socket(fileno=int(os.environ.pop(VARIABLE)))
        wrong = _import_all(os.environ.pop(PRELOAD_VARIABLE, "").split(",")) or _unfit()
        template.sendall(json.dumps(wrong).encode())
        while not wrong:
            _, fds = _receive_fds(template, 1, MOST_AT_ONCE)
            if not fds:  # nobody wants standbys any more
                break
            forked = _fork(fds)
            if forked is not None:
                template.close()
                _stand_by(*forked, parent)
                for s, action in before.items():
                    signal.signal(s, action)
                return
    except BaseException:  # whatever happened: without its rank this process must never reach the script
        os._exit(1)
    os._exit(0)


def _import_all(more: list[str]) -> str:
    for name in PRELOAD:
        with suppress(Exception):  # the script will meet whatever is wrong, and say so in its own name
            importlib.import_module(name)
    for name in filter(None, more):
        try:
            importlib.import_module(name.removeprefix("?"))
        except Exception as e:  # the named module's own code runs here, and may raise anything
            if not name.startswith("?"):
                return f"--preload {name} failed: {type(e).__name__}: {e}"
    if folder := _folder_made_at_import():  # its standbys each make their own
        sys.path.remove(folder.name)
        folder.cleanup()
    return ""


def _folder_made_at_import() -> Any:
    """The temporary folder that older torch (2.6 does, 2.13 does not) makes, and puts on the path, when it is imported."""
    return getattr(sys.modules.get(_MAKES_FOLDER), "_TEMP_DIR", None)


def _unfit() -> str:
    """Why a fork of this process would not be a fresh one, in words."""
    trial = _quiet_fork()
    if not trial:
        os._exit(0)
    os.waitpid(trial, 0)
    # counted after a fork: libraries that look after theirs by themselves (OpenBLAS) have ended their threads for it
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"what was imported has started {threads - 1} threads"
    cuda = sys.modules.get("torch.cuda")
    return "what was imported has initialised CUDA" if cuda is not None and cuda.is_initialized() else ""


def _quiet_fork() -> int:
    with warnings.catch_warnings():  # newer Pythons warn of threads, which _unfit looks for
        warnings.simplefilter("ignore")
        return os.fork()


def _fork(fds: list[int]) -> tuple[int, int] | None:
    """Fork a standby for each descriptor; in a standby: (its descriptor, one that ends once the supervisor has become its parent).

    By way of a process between them that ends at once: its orphans go to the supervisor, whose children ranks must be.
    """
    adopted, template_lives = os.pipe()
    between = _quiet_fork()
    if not between:
        for fd in fds:
            if not _quiet_fork():
                for other in (template_lives, *(f for f in fds if f != fd)):
                    os.close(other)
                return fd, adopted
        os._exit(0)
    for fd in (adopted, *fds):
        os.close(fd)
    os.waitpid(between, 0)
    os.close(template_lives)
    return None


def _stand_by(fd: int, adopted: int, parent: int) -> None:
    """Become a fresh process as far as a script can tell, wait, and become the rank that the supervisor describes."""
    os.read(adopted, 1)
    os.close(adopted)
    os.setsid()
    die_with_parent(parent)
    _forget_the_template()
    with socket.socket(fileno=fd) as channel:
        channel.sendall(os.getpid().to_bytes(4, "big"))
        env, fds = _receive_go(channel)
    os.environ.clear()
    os.environ.update(env)
    for kind, target in (("out", 1), ("err", 2)):
        if kind in fds:
            os.dup2(fds[kind], target)
            os.close(fds[kind])
    os.environ[progress.PAGE_FD_VARIABLE] = str(fds["page"])


def _forget_the_template() -> None:
    """Draw anew what a process draws once at its start; `random` does so by itself. The hash seed alone stays the template's."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if _folder_made_at_import():
        importlib.reload(sys.modules[_MAKES_FOLDER])
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if hasattr(threading.main_thread(), "_set_native_id"):
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]


def _receive_go(channel: socket.socket) -> tuple[dict[str, str], dict[str, int]]:
    head, fds = _receive_fds(channel, 4, 3)
    raw, size = bytearray(), int.from_bytes(head, "big")
    while len(raw) < size and (part := channel.recv(size - len(raw))):
        raw += part
    body = json.loads(bytes(raw))
    return body["env"], dict(zip(body["fds"], fds, strict=True))


def _receive_fds(channel: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    head, ancillary, _, _ = channel.recvmsg(size, socket.CMSG_SPACE(most * fds.itemsize))
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return head, list(fds)
