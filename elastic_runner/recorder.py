"""Turns what the ranks' pages say into events, and the restart into the one line that people read."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence

from ..fault_injection import Fault
from ..progress import Mark, Phase, Progress
from .attempt import Attempt, Broken
from .events import (
    ChaosFired,
    Failed,
    FirstStep,
    Notice,
    RankExited,
    RankHung,
    RankProgress,
    Receipt,
    ReplicasTold,
    Restored,
    RoundFormed,
    StackDumped,
)
from .journal import Journal
from .nodes.member import Formed
from .pacing import Pacing
from .saves import Saves

_PROGRESS_EVERY_S = 5.0


class Recorder:
    """Keeps the record of a run's attempts; knows nothing of policy."""

    def __init__(self, journal: Journal, chaos: tuple[Fault, ...], say: Callable[[str], None]) -> None:
        self.fired: set[int] = set()
        """Entries of the chaos plan that have fired in this run."""
        self.best_step = -1
        """The furthest step that any attempt reached."""
        self.known_start_s = 0.0
        """How long the slowest start so far took, to its first step."""
        self.on_look: Callable[[Sequence[Progress]], None] = lambda pages: None
        """Is shown the pages at each look."""
        self.carry_out: Callable[[Fault, int], None] = lambda fault, slot: None
        """Does what an entry of the chaos plan wants done by the launcher; a rank has found it due, or the clock."""
        self.can: Callable[[Fault], bool] = lambda fault: True
        """Whether there is anything that an entry could hurt."""
        self._journal = journal
        self._chaos = chaos
        self._say = say
        self._fault_t = 0.0
        self._sizes: tuple[int, int] | None = None
        self._last_sizes: tuple[int, int] | None = None
        self._restored = self._stepped = False
        self._progress_t = 0.0
        self.pacing = Pacing(journal, say)
        """What holds the ranks up."""
        self.saves = Saves(journal, self.notice, self.note)
        """What becomes of the snapshots."""
        self._in_vain = self._saves_made = 0
        """Failures in a row that left no checkpoint newer than the one before, and the saves until the last failure."""

    @property
    def training(self) -> bool:
        """Whether every rank of this attempt has finished its first step."""
        return self._stepped

    def attempt_begins(self) -> None:
        """A new attempt's ranks exist: what is known of the last one stays only where it is needed to compare."""
        self._restored = self._stepped = False
        self.pacing.begins()
        self._last_sizes, self._sizes = self._sizes or self._last_sizes, None

    def look(self, attempt: Attempt) -> None:
        """Read the pages, write what is new."""
        pages = attempt.pages()
        if not pages:
            return
        for r in attempt.ranks:
            self.chaos_of(r.rank, r.slot, pages[r.rank])
        every = list(pages.values())
        self.on_look(every)
        if not self._restored and all(p.marks[Mark.RESTORE_END] for p in every) and any(p.restored_step >= 0 for p in every):
            self._restored = True
            p = max(every, key=lambda p: p.marks[Mark.RESTORE_END] - p.marks[Mark.RESTORE_BEGIN])
            took = p.marks[Mark.RESTORE_END] - p.marks[Mark.RESTORE_BEGIN]
            self._journal.write(Restored(step=p.restored_step, source=p.restored_from, seconds=round(took, 6)))
        if not self._stepped and all(p.steps_done for p in every):
            self._stepped = True
            self._write_progress([pages[r] for r in sorted(pages)])  # what was waited for so far belongs to the start
            self._first_step(attempt, every)
        self.best_step = max(self.best_step, *(p.step for p in every)) if self._stepped or not self._fault_t else self.best_step
        if self._journal.clock() - self._progress_t >= _PROGRESS_EVERY_S:
            self.progress(pages)
            self.pacing.look(pages, {r.rank: r.slot for r in attempt.ranks})

    def progress(self, pages: Mapping[int, Progress]) -> None:
        """Write where the ranks are."""
        self.best_step = max([self.best_step, *(p.step for p in pages.values() if p.steps_done)])
        self._write_progress([pages[r] for r in sorted(pages)])

    def _write_progress(self, every: list[Progress]) -> None:
        self._progress_t = now = self._journal.clock()
        self._journal.write(_progress_of(every, now))

    def failure(self, attempt: Attempt, broken: Broken) -> None:
        """Write down everything known of a failure, before anything is stopped."""
        pages = attempt.pages()
        for r in attempt.ranks:
            self.chaos_of(r.rank, r.slot, pages[r.rank])
            if r.code:
                self._journal.write(RankExited(rank=r.rank, slot=r.slot, pid=r.pid, code=r.code, step=pages[r.rank].step))
        for rank, stack in (broken.stacks or {}).items():
            self._journal.write(StackDumped(rank=rank, stack=stack))
        self.progress(pages)
        f = broken.failure
        self._kept_nothing(list(pages.values()))
        self._fault_t = broken.fault_t
        self._journal.write(
            Failed(
                kind=f.kind.value,
                rank=f.rank,
                slot=f.slot,
                step=-1 if f.step is None else f.step,
                best_step=self.best_step,
                cause=f"{broken.cause} ({broken.where})",
                message=f.message,
                log=broken.log,
                fault_t=round(broken.fault_t, 6),
                t=f.t,
            )
        )

    def _kept_nothing(self, pages: list[Progress]) -> None:
        """Say so when attempts end before their first checkpoint, again and again: restarting then only burns time."""
        every, trained = max((p.save_every for p in pages), default=0), max((p.steps_done for p in pages), default=0)
        saved, self._saves_made = self.saves.made > self._saves_made, self.saves.made
        if not every or not trained or saved or any(p.durable_step >= 0 for p in pages):
            self._in_vain = 0
            return
        self._in_vain += 1
        if self._in_vain > 1:
            self.notice(
                f"no progress is kept: {self._in_vain} attempts in a row ended before a checkpoint, the last after {trained} steps, "
                f"and a checkpoint comes every {every} steps (Checkpointer(every={every})); save more often"
            )

    def round_formed(self, formed: Formed, clock_behind_s: float) -> None:
        """The nodes have agreed on a round, and this one is in it."""
        r = formed.round
        self._journal.write(
            RoundFormed(
                generation=r.generation,
                nodes=r.nodes,
                node_rank=formed.place.rank,
                leader=r.leader,
                reason=formed.reason,
                clock_behind_s=round(clock_behind_s, 6),
            )
        )

    def interrupted(self) -> None:
        """Nothing failed, but the attempt is ended now: what coming back costs counts from here."""
        self._fault_t = self._journal.clock()

    def hang(self, broken: Broken, *, dry_run: bool) -> None:
        """Write down what a hang detector found."""
        f = broken.failure
        self._journal.write(
            RankHung(
                rank=f.rank,
                slot=f.slot,
                pid=broken.pid,
                step=-1 if f.step is None else f.step,
                evidence=broken.evidence,
                silent_s=round(broken.silent_s, 3),
                dry_run=dry_run,
            )
        )

    def chaos_from_outside(self, fault: Fault, rank: int, slot: int) -> None:
        """The supervisor is about to inflict `fault` itself."""
        self.fired.add(fault.index)
        self._journal.write(ChaosFired(index=fault.index, entry=fault.text, rank=rank, slot=slot))
        self.carry_out(fault, slot)

    def notice(self, text: str) -> None:
        """Say something, and keep it in the record."""
        self._say(text)
        self.note(text)

    def note(self, text: str) -> None:
        """Keep in the record what somebody else says."""
        self._journal.write(Notice(text=text))

    def replicas(self, step: int, digests: Mapping[int, int]) -> None:
        """Write down what the ranks here have told of their models: the other nodes hear of what is on record."""
        self._journal.write(ReplicasTold(step=step, ranks=tuple(digests), digests=tuple(digests.values())))

    def chaos_of(self, rank: int, slot: int, page: Progress) -> None:
        """Take in which entries of the chaos plan a page says have fired, or fallen due."""
        for fault in self._chaos:
            if page.chaos_fired >> fault.index & 1 and fault.index not in self.fired and self.can(fault):
                self.chaos_from_outside(fault, rank, slot)

    def _first_step(self, attempt: Attempt, pages: list[Progress]) -> None:
        latest = {m: round(max(p.marks[m] for p in pages), 6) for m in Mark}
        first = latest[Mark.FIRST_STEP]
        self.known_start_s = max(self.known_start_s, first - attempt.born_t)
        step = min(p.step - p.steps_done + 1 for p in pages)
        self._journal.write(
            FirstStep(
                step=step,
                boot_t=latest[Mark.BOOT],
                torch_t=latest[Mark.TORCH],
                init_t=latest[Mark.INIT_END],
                restore_begin_t=latest[Mark.RESTORE_BEGIN],
                restore_end_t=latest[Mark.RESTORE_END],
                first_step_t=first,
            )
        )
        self._sizes = (len(pages), pages[0].batch if not any(p.global_batch for p in pages) else 0)
        if self._fault_t:
            text = self._receipt(pages, first - self._fault_t)
            self._say(text)
            self._journal.write(Receipt(text=text))
            self._fault_t = 0.0

    def _receipt(self, pages: list[Progress], seconds: float) -> str:
        parts = [f"back in {seconds:.2f} s with {len(pages)} rank{'s' if len(pages) > 1 else ''} on this node"]
        restored = max(p.restored_step for p in pages)
        if restored >= 0:
            source = os.path.basename(max(p.restored_from for p in pages))
            parts.append(f"from {source}" if str(restored) in source else f"from step {restored} in {source}")
            parts.append(f"{max(self.best_step - restored, 0)} steps to redo")
        if self._last_sizes and self._sizes:
            (n0, b0), (n1, b1) = self._last_sizes, self._sizes
            if b0 and b1 and n0 * b0 != n1 * b1:
                parts.append(f"the global batch is now {n1 * b1} (was {n0 * b0}), for the script fixes its batch per rank")
        return "; ".join(parts)


def _progress_of(every: list[Progress], now: float) -> RankProgress:
    return RankProgress(
        steps=tuple(p.step for p in every),
        data_wait_s=tuple(round(p.data_wait_s + p.since(Phase.DATA, now), 3) for p in every),
        save_stall_s=tuple(round(p.save_stall_s + p.since(Phase.SAVE, now), 3) for p in every),
        longest_step_s=round(max((p.longest_step_s for p in every), default=0.0), 4),
        durable_step=max((p.durable_step for p in every), default=-1),
        eval_s=tuple(round(p.eval_s + p.since(Phase.EVAL, now), 3) for p in every),
        own_s=tuple(round(p.own_s, 3) for p in every),
        last_step_s=tuple(round(p.last_step_s, 4) for p in every),
        silent_s=tuple(round(max(now - p.t, 0.0), 3) if p.t else 0.0 for p in every),
        phases=tuple(p.phase.name.lower() for p in every),
        step_t=round(max((p.step_t for p in every if p.steps_done), default=0.0), 6),
        saved_step=max((p.saved_step for p in every), default=-1),
        loss=statistics.fmean(losses) if (losses := [p.loss for p in every if p.loss is not None]) else None,
    )
