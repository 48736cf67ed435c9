"""Hugging Face's Trainer: its steps, its state and the order of its data kept by a Checkpointer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ... import progress
from ..checkpointer import Checkpointer
from ..errors import CheckpointMismatch
from ..retention import Keep
from ..sampler import ElasticSampler

_KEPT = (
    "global_step",
    "epoch",
    "total_flos",
    "num_input_tokens_seen",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "log_history",
)

_LOADERS = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "prefetch_factor", "persistent_workers", "multiprocessing_context")
"""What is taken over from the trainer's own loader."""


class TrainerCheckpoints(TrainerCallback):  # type: ignore[misc]
    """Keeps a Trainer's run safe: `TrainerCheckpoints(trainer, "checkpoints", every=100)`, then `trainer.train()` as ever.

    It adds itself to the trainer's callbacks. At the start of `train()` it restores the newest whole checkpoint, if there is one; after
    every optimizer step it beats, and saves when a checkpoint is due. The training data is read in the order of an ElasticSampler: each
    sample of an epoch once, whatever the number of ranks was meanwhile. What does not fill a last global batch of an epoch is left out.

    `global_batch` is the number of samples per optimizer step over all ranks, by default what the trainer's arguments make of the ranks
    that there are. Name it where the number of ranks may change. Trainer takes the mean of the ranks' means, so let it divide evenly.
    """

    def __init__(
        self,
        trainer: Any,
        directory: str | os.PathLike[str],
        *,
        every: int | str = 100,
        keep: int | Keep = 3,
        when_busy: str = "wait",
        global_batch: int | None = None,
    ) -> None:
        """`every`, `keep` and `when_busy` are the Checkpointer's; nothing is read or written before `train()`."""
        self._trainer, self._directory = trainer, directory
        self._options: dict[str, Any] = {"every": every, "keep": keep, "when_busy": when_busy}
        self._global_batch = global_batch
        self._their_loader = trainer.get_train_dataloader
        self._sampler: ElasticSampler | None = None
        self._batches: _MicroBatches | None = None
        self._checkpoints: Checkpointer | None = None
        self._epoch_steps = 1
        self._unsaved = False
        self._evaluations = 0
        trainer.get_train_dataloader = self._loader
        trainer.add_callback(self)

    def _loader(self) -> DataLoader[Any]:
        """The trainer's own loader with its order of samples replaced."""
        theirs, args = self._their_loader(), self._trainer.args
        if not hasattr(theirs.dataset, "__len__"):
            raise TypeError(f"a {type(theirs.dataset).__name__} has no length, so there is no position in it to restore")
        parts = args.gradient_accumulation_steps
        whole = self._global_batch or args.train_batch_size * parts * args.world_size
        if whole < parts * args.world_size:
            raise ValueError(f"global_batch={whole} is too small for {parts} micro-batches on each of {args.world_size} ranks")
        seed = args.seed if args.data_seed is None else args.data_seed
        self._sampler = ElasticSampler(theirs.dataset, global_batch=whole, seed=seed, drop_last=True)
        self._batches, self._epoch_steps = _MicroBatches(self._sampler, parts), self._sampler.epoch_length
        return DataLoader(
            theirs.dataset, batch_sampler=self._batches, generator=torch.Generator(), **{name: getattr(theirs, name) for name in _LOADERS}
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore."""
        t, sampler, batches = self._trainer, self._sampler, self._batches
        assert sampler is not None and batches is not None
        optimizer = getattr(t.optimizer, "optimizer", t.optimizer)  # accelerate wraps it
        kept = {"model": t.model, "optimizer": optimizer, "scheduler": t.lr_scheduler, "sampler": sampler, "trainer": _State(t, sampler)}
        if (scaler := getattr(t.accelerator, "scaler", None)) is not None:
            kept["scaler"] = scaler
        self._checkpoints = Checkpointer(self._directory, seed=args.seed, **self._options, **kept)
        self._checkpoints.restore()
        batches.over = state.global_step >= state.max_steps
        # the loss that the trainer logs is the mean since here
        t._initial_global_step = t._globalstep_last_logged = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Beat, and save when it is time; an evaluation of this step comes first, for its loaders draw random numbers."""
        state.epoch = state.global_step / self._epoch_steps  # the trainer counts from where this attempt began
        ends_epoch = state.global_step % self._epoch_steps == 0
        self._unsaved = True
        if control.should_evaluate or (ends_epoch and args.eval_strategy == "epoch"):
            sets = self._trainer.eval_dataset
            self._evaluations = len(sets) if isinstance(sets, dict) else 1
            progress.heartbeat(step=state.global_step)
        else:
            self._step(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An evaluation that was expected did not come (`eval_delay`)."""
        self._step(state)

    def _step(self, state: Any) -> None:
        if self._unsaved and self._checkpoints is not None:
            self._unsaved, self._evaluations = False, 0
            self._checkpoints.step(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An evaluation goes on: it has a limit of its own."""
        progress.heartbeat(phase=progress.Phase.EVAL)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """It is over."""
        progress.heartbeat(phase=progress.Phase.STEP)
        self._evaluations -= 1
        if self._evaluations == 0:
            self._step(state)

    def on_predict(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """So is that."""
        progress.heartbeat(phase=progress.Phase.STEP)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the save that is being written."""
        self._step(state)
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None


class _MicroBatches(Sampler[list[int]]):
    """The rank's part of each global batch, cut into as many micro-batches as gradients are accumulated over."""

    def __init__(self, sampler: ElasticSampler, parts: int) -> None:
        self._sampler, self._parts, self._length = sampler, parts, sampler.epoch_length * parts
        self.over = False
        """The training is: there are no more."""

    def __len__(self) -> int:
        """Those of a whole epoch, whatever is left of this one: the trainer plans with it."""
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        return iter(()) if self.over else self._cut()

    def _cut(self) -> Iterator[list[int]]:
        for mine in self._sampler:
            each, more = divmod(len(mine), self._parts)
            at = 0
            for part in range(self._parts):
                size = each + (part < more)
                yield mine[at : at + size]
                at += size


class _State:
    """What the trainer and its callbacks know beside the weights."""

    def __init__(self, trainer: Any, sampler: ElasticSampler) -> None:
        self._trainer, self._sampler = trainer, sampler

    def state_dict(self) -> dict[str, Any]:
        """Only what a resumed run could not work out anew."""
        kept = {name: getattr(self._trainer.state, name) for name in _KEPT}
        callbacks = [c.state()["attributes"] for c in self._callbacks()]
        return {"global_batch": self._sampler.global_batch, "state": kept, "callbacks": callbacks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back; another global batch would be another run."""
        if state["global_batch"] != self._sampler.global_batch:
            was, now = state["global_batch"], self._sampler.global_batch
            raise CheckpointMismatch(f"saved with {was} samples per step, now {now}: hold it with TrainerCheckpoints(global_batch={was})")
        for name, value in state["state"].items():
            setattr(self._trainer.state, name, value)
        for callback, attributes in zip(self._callbacks(), state["callbacks"], strict=False):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def _callbacks(self) -> list[Any]:
        return [c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
