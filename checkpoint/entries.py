"""How each kind of object gives its state to a checkpoint and takes it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from .codec import Tree

# A parameter that never got a gradient has no optimizer state when saved, but gets one when a fresh optimizer is initialised.
_LENIENT = StateDictOptions(strict=False)


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state and takes it back: schedulers, samplers, a user's own."""

    def state_dict(self) -> Tree:
        """The state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take it back."""


class Model:
    """A module: names are those of the bare module, so DDP, FSDP2 and none of them read each other's checkpoints."""

    def __init__(self, module: nn.Module) -> None:
        """The module may be wrapped."""
        self._module = module
        self._template: Tree = {}

    def capture(self) -> Tree:
        """Parameters and buffers, by name."""
        return get_model_state_dict(self._module)

    def template(self) -> Tree:
        """The live tensors, to be read into."""
        self._template = self.capture()
        return self._template

    def apply(self, tree: Tree, *, strict: bool = True) -> None:
        """Take them back; a missing or unknown name is an error."""
        template, self._template = self._template, {}
        if not all(value is template.get(name) for name, value in tree.items()):  # else they have been read into place
            set_model_state_dict(self._module, tree, options=StateDictOptions(strict=strict))


class Optim:
    """An optimizer: its state is keyed by the names of the parameters in their model, not by their order."""

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        """`module` owns the optimizer's parameters."""
        self._optimizer, self._module = optimizer, module

    def capture(self) -> Tree:
        """State and groups."""
        fresh = not self._optimizer.state
        tree: dict[str, Any] = dict(self.template())
        if fresh:
            # torch has just made a state by a step without gradients, which counts as Adam's first: undo it.
            self._optimizer.state.clear()
            tree["state"] = {}
        return tree

    def template(self) -> Tree:
        """What a capture will look like after the first step; a fresh optimizer is initialised, or its moments could not be loaded."""
        return get_optimizer_state_dict(self._module, self._optimizer)

    def apply(self, tree: Tree, *, strict: bool = True) -> None:
        """Take them back."""
        set_optimizer_state_dict(self._module, self._optimizer, tree, options=_LENIENT)


class Plain:
    """Anything else with state_dict and load_state_dict."""

    def __init__(self, owner: Stateful) -> None:
        """The object that owns the state."""
        self._owner = owner

    def capture(self) -> Tree:
        """Its state."""
        return self._owner.state_dict()

    template = capture

    def apply(self, tree: Tree, *, strict: bool = True) -> None:
        """Take it back."""
        self._owner.load_state_dict(tree)


Entry = Model | Optim | Plain


def entries_of(state: Mapping[str, object]) -> dict[str, Entry]:
    """An entry for each named object, models first: an optimizer is restored into a model that is there already."""
    models = {name: obj for name, obj in state.items() if isinstance(obj, nn.Module)}
    entries: dict[str, Entry] = {name: Model(module) for name, module in models.items()}
    for name, obj in state.items():
        if isinstance(obj, Optimizer):
            entries[name] = Optim(obj, _owner(name, obj, models))
        elif name not in models:
            if not isinstance(obj, Stateful):
                raise TypeError(f"{name}: a {type(obj).__name__} has no state_dict() and load_state_dict(): leave it out or add them")
            entries[name] = Plain(obj)
    return entries


def _owner(name: str, optimizer: Optimizer, models: Mapping[str, nn.Module]) -> nn.Module:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in models.values():
        if mine <= {id(p) for p in module.parameters()}:
            return module
    given = ", ".join(models) or "none"
    raise TypeError(f"{name}: no model given has all its parameters (models given: {given}); give Checkpointer their model too")
