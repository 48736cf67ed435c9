"""Which device a slot is: the list of devices that the user made visible, mapped on those that the driver knows; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .answers import Device

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A slot's device. `name` is what the user's list calls it, `uuid` what the driver is asked about: of a MIG instance the whole GPU."""

    name: str
    uuid: str
    index: int = -1

    @property
    def asked(self) -> str:
        """The UUID of what the rank really has: of a MIG instance that alone."""
        return self.name if self.name.upper().startswith("MIG-") else self.uuid

    @property
    def words(self) -> str:
        """What people call it: the number the driver gave it, and its UUID."""
        return f"GPU {self.index} ({self.uuid})" if self.index >= 0 else self.uuid


def bind(env: Mapping[str, str], devices: Sequence[Device]) -> tuple[Bound, ...]:
    """The device of each slot, in order.

    Without a list of the user's these are all devices, by UUID. With one, its words are kept as they are. As CUDA does, the list is read up
    to the first word that names no device; one that names a device twice makes none visible.
    """
    if VISIBLE not in env:
        return tuple(Bound(name=d.uuid, uuid=d.uuid, index=d.index) for d in devices)
    bound: list[Bound] = []
    for word in (w.strip() for w in env[VISIBLE].split(",")):
        device = _named(word, devices)
        if device is None:
            break
        bound.append(Bound(name=word, uuid=device.uuid, index=device.index))
    whole = {b.asked for b in bound}
    return tuple(bound) if len(whole) == len(bound) else ()


def _named(word: str, devices: Sequence[Device]) -> Device | None:
    """The device that one word of the list means: an index, or a UUID or the beginning of one."""
    if re.fullmatch(r"\d+", word):
        return next((d for d in devices if d.index == int(word)), None)
    if word.upper().startswith("MIG-"):
        # MIG-<uuid>, or the older MIG-GPU-<the GPU's uuid>/instance/instance
        return next((d for d in devices if word in d.instances or word.startswith(f"MIG-{d.uuid}/")), None)
    fits = [d for d in devices if word and d.uuid.lower().startswith(word.lower())]
    return fits[0] if len(fits) == 1 else None
