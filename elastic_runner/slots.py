"""Device slots: how many this node has at the start, and which devices a shrunken set of them sees."""

from __future__ import annotations

from collections.abc import Mapping

from .policy import Slots


def first_slots(nproc: int, *, spares: int, min_nproc: int | None, multiple_of: int) -> Slots:
    """`nproc` slots in use and `spares` more in reserve. Without `--min-nproc` shrinking may go down to one multiple."""
    return Slots(
        active=tuple(range(nproc)),
        spare=tuple(range(nproc, nproc + spares)),
        min_nproc=multiple_of if min_nproc is None else min_nproc,
        multiple_of=multiple_of,
    )


def visible_devices(slots: tuple[int, ...], env: Mapping[str, str], device_count: int) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES must name so that rank i drives slot i's device.

    Empty while the slots are the plain 0…n-1, or where there is no GPU: then the variable is left as the user set it, as torchrun does.
    """
    if slots == tuple(range(len(slots))):
        return ()
    own = [d for d in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    devices = own or [str(i) for i in range(device_count)]
    return tuple(devices[s] for s in slots) if slots and max(slots) < len(devices) else ()
