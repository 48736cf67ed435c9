"""The page by which one rank tells its supervisor, through shared memory, how far it is.

A page is 1 KiB of anonymous shared memory (a memfd: nothing to leak, no /dev/shm). It is written by one process, the rank, and read by
one, the supervisor. Every field is one aligned 64-bit word, so a reader never sees half a value. Writing a beat costs about a
microsecond and makes no system call but the clock's. Standard library only: this module is imported by every worker at start.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

PAGE_FD_VARIABLE = "GOODRUN_PAGE_FD"
PAGE_BYTES = 1024
_TEXT_OFFSET, _TEXT_BYTES = 512, 512


class Phase(IntEnum):
    """What a rank says it is doing; limits for silence are learned per phase."""

    START = 0
    STEP = 1
    DATA = 2
    SAVE = 3
    RESTORE = 4
    EVAL = 5
    IDLE = 6


_START, _STEP, _DATA, _SAVE, _RESTORE, _EVAL, _IDLE = map(int, Phase)  # as for _Word


class Mark(IntEnum):
    """Moments of a worker's life, each stamped once, in the order in which they usually come."""

    BOOT = 0  # the interpreter is up, the script has not begun
    TORCH = 1  # `import torch` is done
    INIT_BEGIN = 2  # init_process_group was called
    INIT_END = 3
    RESTORE_BEGIN = 4
    RESTORE_END = 5
    FIRST_STEP = 6  # the first optimizer step (or step beat) of this attempt is done


class _Word:
    """Where each 64-bit word of a page is. Plain numbers: an enum's names are looked up by Python code, in every step of the training."""

    (
        SEQ, TIME, STEP, PHASE, STEPS_DONE, LAST_STEP_NS, LONGEST_STEP_NS, DATA_WAIT_NS, SAVE_STALL_NS, RESTORED_STEP, SAVED_STEP,
        DURABLE_STEP, BATCH, GLOBAL_BATCH, CHAOS_FIRED, STEP_TIME, EXPLICIT, PHASE_TIME, EVAL_NS, WORKERS, SAVES_ON_STOP, LEFT, SAVE_EVERY,
        OWN_NS, OWN_SINCE, FINITE_STEP, BAD_STEP, RUN_STARTED, LEAVING, LOSS, REPLICA,
    ) = range(31)  # fmt: skip
    # WORKERS is one more than there are, 0 for unknown; LOSS is a double; REPLICA has a step and a digest in one word, for a reader must
    # not see one without the other
    MARKS = 32  # one word per Mark from here on


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A page as read at one moment. Times are monotonic seconds; 0 means never, a step of -1 means unknown."""

    seq: int
    t: float
    step: int
    phase: Phase
    steps_done: int
    last_step_s: float
    longest_step_s: float
    data_wait_s: float
    save_stall_s: float
    eval_s: float
    own_s: float
    """What the rank did by itself, from having its data to its backward pass, where ranks begin to wait for each other."""
    restored_step: int
    saved_step: int
    durable_step: int
    batch: int
    global_batch: int
    workers: int
    """Worker processes of the data loader; -1 if unknown."""
    chaos_fired: int
    finite_step: int
    """The newest step whose loss the script gave and was finite; -1 if none."""
    bad_step: int
    """The first step whose loss was not; -1 if none."""
    loss: float | None
    """The newest finite one, if the script has given any."""
    replica: tuple[int, int] | None
    """A step and the digest that the model had after it; None if there is none."""
    leaving_t: float
    """When its interpreter began to end, 0 if it has not: what it holds, connections above all, goes some time before the process does."""
    run_started: int
    """Wall nanoseconds by which checkpoints are fenced; 0 until that is settled."""
    numbered: bool
    """Whether `step` counts over the whole job: the script numbers its steps, or restored one. Else it counts this attempt's."""
    saves_on_stop: bool
    """Whether the rank answers SIGTERM by saving and leaving."""
    left_step: int
    """The step that it has saved on the way out, because it was asked to stop; -1 if it has not."""
    save_every: int
    """Steps between checkpoints; 0 where there are none, or they come by time."""
    step_t: float
    phase_t: float
    marks: tuple[float, ...]
    restored_from: str

    def since(self, phase: Phase, now: float) -> float:
        """For how long the rank has been in `phase`; 0 if it is in another. What it waits for now is not in its totals yet."""
        return max(now - self.phase_t, 0.0) if self.phase is phase and self.phase_t else 0.0


class Page:
    """One rank's page; `create` in the supervisor, `attach` in the worker."""

    def __init__(self, fd: int) -> None:
        """Map the page behind `fd`; the descriptor stays the caller's."""
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map)[:_TEXT_OFFSET].cast("q")
        self._floats = memoryview(self._map)[:_TEXT_OFFSET].cast("d")
        self.after_step: Callable[[int], None] | None = None
        """Called in the rank after each step it finished, with the step's number; chaos plans hang here."""
        self.on_phase: Callable[[Phase], None] | None = None
        """Called in the rank when it has entered a phase; likewise."""

    @classmethod
    def create(cls) -> tuple[Page, int]:
        """A fresh page, and the descriptor to hand to the worker (not inheritable until passed on)."""
        fd = os.memfd_create("goodrun-page")
        os.ftruncate(fd, PAGE_BYTES)
        page = cls(fd)
        for word in ((w := _Word).STEP, w.RESTORED_STEP, w.SAVED_STEP, w.DURABLE_STEP, w.LEFT, w.FINITE_STEP, w.BAD_STEP, w.REPLICA):
            page._words[word] = -1
        return page, fd

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._floats.release()
        self._map.close()

    @property
    def phase(self) -> int:
        """What the rank says it is doing, a Phase."""
        return self._words[_Word.PHASE]

    @property
    def step(self) -> int:
        """The step last finished, counted over the whole job; -1 before the first."""
        return self._words[_Word.STEP]

    def beat(self, step: int | None = None, phase: int | None = None) -> None:
        """Say "alive", and where: `step` is the number of the step just finished, counted over the whole job; `phase` is a Phase."""
        w, now = self._words, time.monotonic_ns()
        fresh = step is not None and step != w[_Word.STEP]
        if step is not None:
            w[_Word.EXPLICIT] = 1
            if fresh:
                self._stepped(step, now)
        entered = phase if phase is not None and phase != w[_Word.PHASE] else None
        if entered is not None:
            self._enter(entered, now)
        w[_Word.TIME] = now
        w[_Word.SEQ] += 1
        if fresh and self.after_step is not None:
            self.after_step(w[_Word.STEP])
        if entered is not None and self.on_phase is not None:
            self.on_phase(Phase(entered))

    def optimizer_stepped(self) -> None:
        """One optimizer step is done: counts steps until the script names them itself with `beat(step=…)`."""
        # inside a save or a restore it is none of the script's: torch steps a fresh optimizer once to give it a state
        if self._words[_Word.PHASE] in (_SAVE, _RESTORE):
            return
        if self._words[_Word.EXPLICIT]:
            self.beat(phase=_STEP)
            return
        now = time.monotonic_ns()
        self._stepped(max(self._words[_Word.STEP], 0) + 1, now)
        self._words[_Word.TIME] = now
        self._words[_Word.SEQ] += 1
        if self.after_step is not None:
            self.after_step(self.step)

    def _stepped(self, step: int, now: int) -> None:
        w = self._words
        if w[_Word.STEPS_DONE]:  # the first step carries compilation and warm-up: it teaches nothing about the others
            took = now - w[_Word.STEP_TIME]
            w[_Word.LAST_STEP_NS] = took
            if took > w[_Word.LONGEST_STEP_NS]:
                w[_Word.LONGEST_STEP_NS] = took
        else:
            self.mark(Mark.FIRST_STEP)
        w[_Word.STEP_TIME] = now
        w[_Word.STEP] = step
        w[_Word.STEPS_DONE] += 1
        self._enter(_STEP, now)

    def _enter(self, phase: int, now: int) -> None:
        w = self._words
        if w[_Word.PHASE] == _EVAL:
            w[_Word.EVAL_NS] += now - w[_Word.PHASE_TIME]
        w[_Word.PHASE] = phase
        w[_Word.PHASE_TIME] = now

    def mark(self, mark: Mark) -> None:
        """Stamp a moment; only the first time counts."""
        if not self._words[_Word.MARKS + mark]:
            self._words[_Word.MARKS + mark] = time.monotonic_ns()

    def fetch_begins(self) -> int:
        """The loop asks its loader for a batch: when, in nanoseconds; 0 in an evaluation, whose own data is part of it."""
        w, now = self._words, time.monotonic_ns()
        w[_Word.TIME] = now
        w[_Word.SEQ] += 1
        if w[_Word.PHASE] == _EVAL:
            return 0
        self._enter(_DATA, now)
        if self.on_phase is not None:
            self.on_phase(Phase.DATA)
        return now

    def fetch_ends(self, begun: int) -> None:
        """The batch is there, or there is none any more."""
        w, now = self._words, time.monotonic_ns()
        w[_Word.DATA_WAIT_NS] += now - begun
        w[_Word.TIME] = now
        w[_Word.SEQ] += 1
        self._enter(_STEP if w[_Word.STEP] >= 0 else _START, now)
        if self.on_phase is not None:
            self.on_phase(Phase(w[_Word.PHASE]))

    def meets_peers(self) -> None:
        """The backward pass begins: what came since the last fetch, save or step was this rank's own work."""
        w = self._words
        if w[_Word.PHASE] == _STEP and w[_Word.STEPS_DONE] and w[_Word.OWN_SINCE] != w[_Word.PHASE_TIME]:
            w[_Word.OWN_SINCE] = w[_Word.PHASE_TIME]  # a second backward of the same batch may have waited for peers
            w[_Word.OWN_NS] += time.monotonic_ns() - w[_Word.PHASE_TIME]

    def save_stalled(self, ns: int) -> None:
        """The loop was held up this long by a checkpoint."""
        self._words[_Word.SAVE_STALL_NS] += ns

    def loss(self, step: int, value: float) -> None:
        """Step `step` had this loss."""
        value = float(value)  # a tensor, for whoever gives one
        if math.isfinite(value):
            self._words[_Word.FINITE_STEP] = step
            self._floats[_Word.LOSS] = value
        elif self._words[_Word.BAD_STEP] < 0:
            self._words[_Word.BAD_STEP] = step

    def replica(self, step: int, digest: int) -> None:
        """After step `step` the model has this digest; of the step 23 bits are kept, of the digest 40."""
        self._words[_Word.REPLICA] = (step & 0x7F_FFFF) << 40 | digest & 0xFF_FFFF_FFFF

    def run_started(self, ns: int) -> None:
        """The start of the run by which checkpoints are fenced from now on: another one than the launcher's, where a clock was wrong."""
        self._words[_Word.RUN_STARTED] = ns

    def leaving(self) -> None:
        """This rank's interpreter begins to end."""
        self._words[_Word.LEAVING] = time.monotonic_ns()

    def saved(self, step: int) -> None:
        """A checkpoint of this step was taken (not yet durable)."""
        self._words[_Word.SAVED_STEP] = step

    def durable(self, step: int) -> None:
        """The checkpoint of this step is complete on storage."""
        self._words[_Word.DURABLE_STEP] = step

    def saves_on_stop(self, does: bool) -> None:
        """Whether SIGTERM makes this rank save and leave, in place of ending it at once."""
        self._words[_Word.SAVES_ON_STOP] = does

    def save_every(self, steps: int) -> None:
        """A checkpoint comes every so many steps."""
        self._words[_Word.SAVE_EVERY] = steps

    def left(self, step: int) -> None:
        """This rank was asked to stop, has saved `step` and is leaving."""
        self._words[_Word.LEFT] = step

    def restored(self, step: int, source: str) -> None:
        """The state of `step` was restored from `source` (a path, cut to what fits)."""
        self._words[_Word.RESTORED_STEP] = step
        self._words[_Word.STEP] = step
        raw = source.encode()[-(_TEXT_BYTES - 1) :]
        self._map[_TEXT_OFFSET : _TEXT_OFFSET + len(raw) + 1] = raw + b"\0"

    def batch_sizes(self, *, per_rank: int | None = None, whole: int | None = None) -> None:
        """Samples per step: of this rank's loader, or of the whole job where the sampler holds it fixed."""
        if per_rank is not None:
            self._words[_Word.BATCH] = per_rank
        if whole is not None:
            self._words[_Word.GLOBAL_BATCH] = whole

    def loader_workers(self, n: int) -> None:
        """The data loader has `n` worker processes."""
        self._words[_Word.WORKERS] = n + 1

    def chaos_fires(self, index: int) -> None:
        """Entry `index` (0…62) of the chaos plan is about to fire in this rank."""
        self._words[_Word.CHAOS_FIRED] |= 1 << index

    def read(self) -> Progress:
        """The page as it is now."""
        w = self._words
        return Progress(
            seq=w[_Word.SEQ],
            t=w[_Word.TIME] / 1e9,
            step=w[_Word.STEP],
            phase=Phase(w[_Word.PHASE]),
            steps_done=w[_Word.STEPS_DONE],
            last_step_s=w[_Word.LAST_STEP_NS] / 1e9,
            longest_step_s=w[_Word.LONGEST_STEP_NS] / 1e9,
            data_wait_s=w[_Word.DATA_WAIT_NS] / 1e9,
            save_stall_s=w[_Word.SAVE_STALL_NS] / 1e9,
            eval_s=w[_Word.EVAL_NS] / 1e9,
            own_s=w[_Word.OWN_NS] / 1e9,
            restored_step=w[_Word.RESTORED_STEP],
            saved_step=w[_Word.SAVED_STEP],
            durable_step=w[_Word.DURABLE_STEP],
            batch=w[_Word.BATCH],
            global_batch=w[_Word.GLOBAL_BATCH],
            workers=w[_Word.WORKERS] - 1,
            chaos_fired=w[_Word.CHAOS_FIRED],
            finite_step=w[_Word.FINITE_STEP],
            bad_step=w[_Word.BAD_STEP],
            loss=self._floats[_Word.LOSS] if w[_Word.FINITE_STEP] >= 0 else None,
            replica=_replica(w[_Word.REPLICA], w[_Word.STEP]),
            leaving_t=w[_Word.LEAVING] / 1e9,
            run_started=w[_Word.RUN_STARTED],
            numbered=bool(w[_Word.EXPLICIT]) or w[_Word.RESTORED_STEP] >= 0,
            saves_on_stop=bool(w[_Word.SAVES_ON_STOP]),
            left_step=w[_Word.LEFT],
            save_every=w[_Word.SAVE_EVERY],
            step_t=w[_Word.STEP_TIME] / 1e9,
            phase_t=w[_Word.PHASE_TIME] / 1e9,
            marks=tuple(w[_Word.MARKS + m] / 1e9 for m in Mark),
            restored_from=self._map[_TEXT_OFFSET:PAGE_BYTES].split(b"\0", 1)[0].decode(errors="replace"),
        )


def _replica(word: int, newest: int) -> tuple[int, int] | None:
    """The word has the lower bits of the step, which is none later than the newest."""
    return None if word < 0 else (newest - (newest - (word >> 40) & 0x7F_FFFF), word & 0xFF_FFFF_FFFF)


_page: Page | None = None


def page() -> Page | None:
    """This process's page; None where no supervisor gave one (plain python or torchrun, or a child of a rank)."""
    return _page


def attach(fd: int) -> Page:
    """Take the page that the supervisor handed over as descriptor `fd`; the descriptor is closed. Children get no page."""
    global _page
    _page = Page(fd)
    os.close(fd)
    os.register_at_fork(after_in_child=_detach)
    return _page


def _detach() -> None:
    global _page
    _page = None


def heartbeat(step: int | None = None, phase: Phase | str | None = None, loss: float | None = None) -> None:
    """Say that this rank is alive: a no-op outside goodrun.

    Steps are noticed by themselves from the optimizer; call this where there is no optimizer, to number steps over the whole job
    (`step`: the step just finished), or to announce a long stretch (`phase="eval"`), which then has a limit of its own. A `loss` that is
    not finite makes goodrun go back to the newest checkpoint before the numbers went bad.
    """
    if _page is not None:
        if loss is not None:
            _page.loss(_page.step if step is None else step, float(loss))
        _page.beat(step, Phase[phase.upper()] if isinstance(phase, str) else phase)


@contextmanager
def in_phase(phase: Phase) -> Iterator[None]:
    """Run a block under the name of `phase`; the phase before comes back afterwards."""
    before = Phase(_page._words[_Word.PHASE]) if _page is not None else phase
    if _page is not None:
        _page.beat(phase=phase)
    try:
        yield
    finally:
        if _page is not None:
            _page.beat(phase=before)
