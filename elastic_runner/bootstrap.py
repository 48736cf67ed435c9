"""What runs inside a worker before the user's script: the page, the hooks that beat, and the way its death is reported.

Standard library only, and quick: this is on the path of every start. torch is not imported here; its parts are hooked when the script
imports them.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

from .. import progress
from ..progress import Mark, Page, Phase

STACK_FILE_VARIABLE = "GOODRUN_STACK_FILE"
REQUEUE_VARIABLE = "GOODRUN_REQUEUE_SIGNAL"
"""The signal that is meant for the launcher alone, though a scheduler may send it to every process of the job."""
MODULES_FILE_VARIABLE = "GOODRUN_MODULES_FILE"
"""Where rank 0 lists, after its first step, what the script has imported (`--preload auto`)."""
STACK_SIGNAL = signal.SIGRTMAX - 3
"""Asks a worker for its Python stack. A real-time signal that neither glibc, Python nor the schedulers use."""


_first_step: list[Callable[[], None]] = []


def instrument() -> None:
    """Beat for the supervisor, dump stacks when it asks, report an uncaught exception to it."""
    page = progress.attach(int(os.environ.pop(progress.PAGE_FD_VARIABLE)))
    stacks = os.environ.pop(STACK_FILE_VARIABLE, "")
    if stacks:
        fd = os.open(stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # what is left when the interpreter ends: a late question must not kill the rank
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False)
    if ours := os.environ.pop(REQUEUE_VARIABLE, ""):
        signal.signal(getattr(signal, ours), signal.SIG_IGN)
    page.mark(Mark.BOOT)  # from here on it may be asked for its stack
    page.beat(phase=Phase.START)
    _arm_chaos(page)
    _list_modules(os.environ.pop(MODULES_FILE_VARIABLE, ""))
    _report_exceptions()
    atexit.register(_leaving)
    if "torch" in sys.modules:  # kept warm
        page.mark(Mark.TORCH)


def hook_imports() -> None:
    """Have torch's parts hooked as they are imported, by the script or before it."""
    sys.meta_path.insert(0, _HookFinder())


def _list_modules(path: str) -> None:
    """After the first step, write the names of the installed modules that the script has imported to `path`, one on a line."""
    if not path or os.environ.get("RANK") != "0":
        return
    before = set(sys.modules)

    def write() -> None:
        _first_step.clear()
        installed = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")})
        new = [n for n, m in list(sys.modules.items()) if n not in before and (getattr(m, "__file__", None) or "").startswith(installed)]
        with contextlib.suppress(OSError):  # it only serves the next start
            part = f"{path}.{os.getpid()}"
            with open(part, "w") as f:
                f.write("\n".join(new))
            os.replace(part, path)

    _first_step.append(write)


def _arm_chaos(page: Page) -> None:
    if "GOODRUN_CHAOS" in os.environ:
        from ..fault_injection import injectors

        injectors.arm(os.environ, page)


def _leaving() -> None:
    if (page := progress.page()) is not None:
        page.leaving()


def _report_exceptions() -> None:
    """Write an uncaught exception where torchrun's @record would, so that the supervisor can show it without any decorator."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a loader's handler raises wherever the main thread is, here too
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and not os.path.exists(path):
            stack = "".join(traceback.format_exception(kind, value, tb))
            extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
            body = {"message": {"message": f"{kind.__name__}: {value}", "extraInfo": extra}}
            try:
                with open(path, "w") as f:
                    json.dump(body, f)
            except OSError:
                pass  # the traceback still goes to stderr
        before(kind, value, tb)

    sys.excepthook = hook


class _HookFinder(importlib.abc.MetaPathFinder):
    """Notices the import of a few torch modules and hooks each right after it was executed."""

    def __init__(self) -> None:
        self._hooks: dict[str, Callable[[Any], None]] = {
            "torch": _torch_imported,
            "torch.autograd": _hook_backward,
            "torch.optim.optimizer": _hook_optimizer,
            "torch.utils.data.dataloader": _hook_dataloader,
            "torch.distributed.distributed_c10d": _hook_init,
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a hooked module as the others would, and wrap its loader; leave every other name alone."""
        hook = self._hooks.pop(fullname, None)
        if hook is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _run_after(spec.loader, hook)
                if not self._hooks:
                    sys.meta_path.remove(self)
                return spec
        return None


def _run_after(loader: Any, hook: Callable[[Any], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # the loader is the module's own again
        execute(module)
        hook(module)

    loader.exec_module = exec_module


def _reached(mark: Mark) -> None:
    if (page := progress.page()) is not None:
        page.mark(mark)
        page.beat()


def _torch_imported(module: Any) -> None:
    _reached(Mark.TORCH)


def _hook_optimizer(module: Any) -> None:
    def stepped(*_: object) -> None:
        live = progress.page()
        if live is not None:
            live.optimizer_stepped()
            for listener in tuple(_first_step):
                listener()

    module.register_optimizer_step_post_hook(stepped)


def _hook_backward(module: Any) -> None:
    backward = module.backward

    @functools.wraps(backward)
    def met(*args: Any, **kwargs: Any) -> Any:
        live = progress.page()
        if live is not None:
            live.meets_peers()
        return backward(*args, **kwargs)

    module.backward = met


def _hook_dataloader(module: Any) -> None:
    iterator = module._BaseDataLoaderIter
    fetch = iterator.__next__

    @functools.wraps(fetch)
    def timed(self: Any) -> Any:
        live = progress.page()
        begun = live.fetch_begins() if live is not None else 0
        if live is None or not begun:
            return fetch(self)
        try:
            return fetch(self)
        finally:
            live.fetch_ends(begun)
            if not self.__dict__.get("_goodrun_told"):
                self._goodrun_told = True
                _tell_of_loader(live, self)

    iterator.__next__ = timed


def _tell_of_loader(live: Page, iterator: Any) -> None:
    size = getattr(iterator._index_sampler, "batch_size", None)
    if isinstance(size, int):
        live.batch_sizes(per_rank=size)
    live.loader_workers(getattr(iterator, "_num_workers", -1))


def _hook_init(module: Any) -> None:
    init = module.init_process_group

    @functools.wraps(init)
    def marked(*args: Any, **kwargs: Any) -> Any:
        _reached(Mark.INIT_BEGIN)
        if (page := progress.page()) is not None and page.on_phase is not None:
            page.on_phase(Phase.START)
        result = init(*args, **kwargs)
        _reached(Mark.INIT_END)
        return result

    module.init_process_group = marked
