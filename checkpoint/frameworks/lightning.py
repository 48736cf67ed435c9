"""Lightning's Trainer: its loops, its callbacks and the order of its data kept by a Checkpointer."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

from lightning.pytorch import Callback

from ... import progress
from ..checkpointer import Checkpointer
from ..retention import Keep
from ..sampler import ElasticSampler


class LightningSampler(ElasticSampler):
    """An ElasticSampler that tells Lightning the length of a whole epoch, also where it begins in the middle of one."""

    def __len__(self) -> int:
        """Batches of an epoch: Lightning counts on from the batch at which the run was interrupted."""
        return self.epoch_length


class LightningCheckpoints(Callback):  # type: ignore[misc]
    """Keeps a Lightning run safe: `Trainer(callbacks=[LightningCheckpoints("checkpoints", every=100, sampler=sampler)], …)`.

    At the start of `fit()` it restores the newest whole checkpoint, if there is one: weights, optimizers, schedulers, loops, callbacks and
    random states. After every optimizer step it beats, and saves when a checkpoint is due.

    `sampler` is the batch sampler of the training data, a LightningSampler: `DataLoader(data, batch_sampler=sampler,
    generator=torch.Generator())`. Tell Lightning to leave it alone: `Trainer(use_distributed_sampler=False)`. Its global batch is that of
    one `training_step` over all ranks. With gradients accumulated, checkpoints are made between optimizer steps only.

    Validation at the end of an epoch comes before the checkpoint of its last step. One within an epoch (`val_check_interval`) comes after
    that of its step, and a run that is restored right there goes on without it: give its loader a generator of its own.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        sampler: LightningSampler,
        every: int | str = 100,
        keep: int | Keep = 3,
        when_busy: str = "wait",
        seed: int = 0,
    ) -> None:
        """The other arguments are the Checkpointer's; nothing is read or written before `fit()`."""
        self._directory, self._sampler = directory, sampler
        self._options: dict[str, Any] = {"every": every, "keep": keep, "when_busy": when_busy, "seed": seed}
        self._checkpoints: Checkpointer | None = None
        self._run: _Run | None = None
        self._step = 0
        self._nobody_stops = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore, before the loops and the loader begin."""
        self._run = _Run(trainer, self._sampler)
        kept: dict[str, Any] = {"model": pl_module, "run": self._run, "precision": trainer.precision_plugin}
        kept |= {f"optimizer{i}": optimizer for i, optimizer in enumerate(trainer.optimizers)}
        kept |= {f"scheduler{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
        self._checkpoints = Checkpointer(self._directory, **self._options, **kept)
        self._step = self._checkpoints.restore()
        self._nobody_stops = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        warnings.filterwarnings("ignore", ".*your dataloader is not resumable")  # it is: its sampler knows where it was

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See that Lightning reads the data in our order, and leaves the stop signal to the Checkpointer."""
        if getattr(trainer.train_dataloader, "batch_sampler", None) is not self._sampler:
            raise ValueError(
                "the training data is not read through the LightningSampler that LightningCheckpoints was given: "
                "say DataLoader(data, batch_sampler=sampler) and Trainer(use_distributed_sampler=False)"
            )
        if self._nobody_stops:  # Lightning's own answer is to leave at once
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Beat, and save when it is time; what follows the last batch of an epoch (validation, schedules) comes first."""
        self._sampler.consumed()
        if trainer.is_last_batch:
            progress.heartbeat(step=trainer.global_step)
        elif trainer.global_step > self._step:  # else gradients are being accumulated
            self._stepped(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """The epoch before is really over."""
        if trainer.global_step > self._step:
            self._between_epochs(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """So is the last one."""
        if trainer.global_step > self._step:
            self._between_epochs(trainer)

    def _between_epochs(self, trainer: Any) -> None:
        assert self._run is not None
        self._run.between_epochs = True
        try:
            self._stepped(trainer)
        finally:
            self._run.between_epochs = False

    def _stepped(self, trainer: Any) -> None:
        assert self._checkpoints is not None
        self._step = trainer.global_step
        self._checkpoints.step(self._step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """An evaluation goes on: it has a limit of its own."""
        progress.heartbeat(phase=progress.Phase.EVAL)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """It is over."""
        progress.heartbeat(phase=progress.Phase.STEP)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the save that is being written."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None


class _Run:
    """Where Lightning's loops and the data are, and the states of its callbacks by Lightning's own key."""

    def __init__(self, trainer: Any, sampler: ElasticSampler) -> None:
        self._trainer, self._sampler = trainer, sampler
        self.between_epochs = False

    def state_dict(self) -> dict[str, Any]:
        """Those of the callbacks that have one."""
        loops = self._trainer.fit_loop.state_dict()
        if self.between_epochs:  # Lightning takes up a loop that was left in the middle of a batch or behind one, not between two epochs
            for counts in loops["epoch_progress"].values():
                counts["ready"] = counts["completed"]
        callbacks = {c.state_key: state for c in self._trainer.callbacks if (state := c.state_dict())}
        return {"loops": loops, "between": self.between_epochs, "sampler": self._sampler.state_dict(), "callbacks": callbacks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Each callback takes its own back; one that is new begins anew."""
        self._trainer.fit_loop.load_state_dict(state["loops"])
        if state["between"]:
            self._trainer.fit_loop.restarting = False
        self._sampler.load_state_dict(state["sampler"])
        for callback in self._trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
