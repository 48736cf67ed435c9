"""How each kind of object gives its state to a checkpoint and takes it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
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
        self.module = module
        self._template: Tree = {}
        self._bound: tuple[object, Tree] = (None, {})

    def capture(self) -> Tree:
        """Parameters and buffers, by name; torch is asked only when they are not the ones it named last time."""
        seen = _tensors_of(self.module)
        if seen is None or seen != self._bound[0]:
            tree = get_model_state_dict(self.module)
            self._bound = (_tensors_of(self.module), tree)
        return self._bound[1]

    def template(self) -> Tree:
        """The live tensors, to be read into."""
        self._template = self.capture()
        return self._template

    def apply(self, tree: Tree, *, strict: bool = True) -> None:
        """Take them back; a missing or unknown name is an error."""
        template, self._template = self._template, {}
        if not all(value is template.get(name) for name, value in tree.items()):  # else they have been read into place
            set_model_state_dict(self.module, tree, options=StateDictOptions(strict=strict))


class Optim:
    """An optimizer: its state is keyed by the names of the parameters in their model, not by their order."""

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        """`module` owns the optimizer's parameters."""
        self._optimizer, self._module = optimizer, module
        self._names: tuple[list[int], list[list[str]]] = ([], [])
        self._asked_for: list[list[str]] = []

    def capture(self) -> Tree:
        """State and groups; torch is asked for the parameters' names only when they are not the ones it named last time."""
        params = [id(p) for group in self._optimizer.param_groups for p in group["params"]]
        if self._optimizer.state and params == self._names[0] and _plain(self._optimizer):
            return self._named()
        tree = self._asked()
        self._names = (params, [list(group["params"]) for group in tree["param_groups"]])
        return tree

    def _named(self) -> Tree:
        state: dict[str, Any] = {}
        groups = []
        for group, names in zip(self._optimizer.param_groups, self._names[1], strict=True):
            state |= {n: self._optimizer.state[p] for n, p in zip(names, group["params"], strict=True) if p in self._optimizer.state}
            groups.append({**group, "params": names})
        return {"state": state, "param_groups": groups}

    def _asked(self) -> dict[str, Any]:
        fresh = not self._optimizer.state
        tree: dict[str, Any] = dict(self.template())
        if fresh:
            # torch has just made a state by a step without gradients, which counts as Adam's first: undo it.
            self._optimizer.state.clear()
            tree["state"] = {}
        return tree

    def template(self) -> Tree:
        """What a capture will look like after the first step; a fresh optimizer is initialised, or its moments could not be loaded."""
        tree: dict[str, Any] = dict(get_optimizer_state_dict(self._module, self._optimizer))
        self._asked_for = [group["params"] for group in tree["param_groups"]]
        return tree

    def apply(self, tree: Tree, *, strict: bool = True) -> None:
        """Take them back."""
        if not self._in_place(tree):
            set_optimizer_state_dict(self._module, self._optimizer, tree, options=_LENIENT)
            return
        for group, saved in zip(self._optimizer.param_groups, tree["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _in_place(self, tree: Tree) -> bool:
        """Whether all tensors have been read into this optimizer's own, and nothing but the groups' numbers is left to be set."""
        groups, saved = self._optimizer.param_groups, tree["param_groups"]
        if not _loads_plainly(self._optimizer) or [group["params"] for group in saved] != self._asked_for:
            return False
        pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        for mine, theirs in zip(groups, saved, strict=True):
            named = zip(mine["params"], theirs["params"], strict=True)
            pairs += [(self._optimizer.state.get(p, {}), tree["state"].get(name, {})) for p, name in named]
        same = all(mine.keys() == theirs.keys() and all(mine[k] is theirs[k] for k in mine) for mine, theirs in pairs)
        tensors = [(k, v) for group in saved for k, v in group.items() if isinstance(v, torch.Tensor)]
        return same and not tensors and all(mine.keys() == theirs.keys() for mine, theirs in zip(groups, saved, strict=True))


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


def _tensors_of(module: nn.Module) -> tuple[object, ...] | None:
    """What tells that a module still has the very tensors it had; None where its own code decides what its state is."""
    found: list[object] = []
    for m in module.modules():
        hooks = [*m._state_dict_hooks.values(), *m._state_dict_pre_hooks.values()]
        own = type(m).get_extra_state is not nn.Module.get_extra_state or type(m).state_dict is not nn.Module.state_dict
        # FSDP2's own hook puts parameters back into shards; where they are not, they are other tensors than before.
        if own or any(not getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.") for hook in hooks):
            return None
        for t in (*m._parameters.values(), *m._buffers.values()):
            if t is not None:
                found += (id(t), (t._local_tensor if isinstance(t, DTensor) else t).data_ptr())
    return tuple(found)


def _plain(optimizer: Optimizer) -> bool:
    hooked = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    return not hooked and type(optimizer).state_dict is Optimizer.state_dict


def _loads_plainly(optimizer: Optimizer) -> bool:
    hooked = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    return not hooked and type(optimizer).load_state_dict is Optimizer.load_state_dict


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
