"""Copies out of GPU memory that the training loop does not wait for: pinned pages, and a stream of their own for each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is a GPU's."""
    return tensor.is_cuda


class GpuCopies:
    """The streams of one rank. Not to be made before the script has touched its GPU."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pin(self, address: int, size: int) -> bool:
        """Pin pages that are there already, so that copies into them run beside the host; False where the driver will not."""
        return not int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))

    def unpin(self, address: int) -> None:
        """Before the pages are unmapped."""
        torch.cuda.cudart().cudaHostUnregister(address)

    def copy(self, pairs: Pairs) -> Callable[[], None]:
        """Queue the copies (into, out of) and return; what is returned waits until they are done.

        What the script queues afterwards comes after the copies on the device, so it may change its tensors at once; the copies come after
        all that it had queued before.
        """
        done = []
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, source in pairs:
            by_device.setdefault(source.device, []).append((target, source))
        for device, copies in by_device.items():
            own = self._streams.setdefault(device, torch.cuda.Stream(device))
            script = torch.cuda.current_stream(device)
            own.wait_stream(script)
            with torch.cuda.stream(own):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
                event = own.record_event()
            script.wait_event(event)
            done.append(event)

        def wait() -> None:
            for event in done:
                event.synchronize()

        return wait
