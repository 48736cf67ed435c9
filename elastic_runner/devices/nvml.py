"""The questions put to NVIDIA's library about one device; in the prober's process only, because any of them may never return."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .answers import NOT_SUPPORTED, Answer, Device, Held, Told
from .kernel_log import Place

RECOVERY_ACTION = 230
_PCIE_FATAL = 180
_NVLINK_COUNT = 91
_NVLINK_REPLAYS, _NVLINK_RECOVERIES = 52, 59
_NVLINK_CRC = (38, 45)
_XID_EVENT = 0x8
_UNCORRECTED, _CORRECTED, _SINCE_DRIVER_START = 1, 0, 0
_GPU_MAX = 3
_SM_CLOCK = 1
_MOST_LINKS = 36


class Nvml:
    """The library, once it is initialised. Raises what nvidia-ml-py raises, or ImportError without it."""

    def __init__(self) -> None:
        import pynvml  # an optional dependency: goodrun[gpu]

        self._lib: Any = pynvml
        self._lib.nvmlInit()
        self._events = self._lib.nvmlEventSetCreate()
        self.queries: dict[str, Callable[[Any], int]] = {
            "recovery_action": lambda h: self._field(h, RECOVERY_ACTION),
            "ecc_uncorrected": lambda h: int(self._lib.nvmlDeviceGetTotalEccErrors(h, _UNCORRECTED, _SINCE_DRIVER_START)),
            "ecc_corrected": lambda h: int(self._lib.nvmlDeviceGetTotalEccErrors(h, _CORRECTED, _SINCE_DRIVER_START)),
            "remap_pending": lambda h: int(self._lib.nvmlDeviceGetRemappedRows(h)[2]),
            "remap_failure": lambda h: int(self._lib.nvmlDeviceGetRemappedRows(h)[3]),
            "clock_reasons": lambda h: int(self._lib.nvmlDeviceGetCurrentClocksEventReasons(h)),
            "sm_clock": lambda h: int(self._lib.nvmlDeviceGetClockInfo(h, _SM_CLOCK)),
            "sm_clock_max": lambda h: int(self._lib.nvmlDeviceGetMaxClockInfo(h, _SM_CLOCK)),
            "temperature": lambda h: int(self._lib.nvmlDeviceGetTemperature(h, 0)),
            "temperature_limit": lambda h: int(self._lib.nvmlDeviceGetTemperatureThreshold(h, _GPU_MAX)),
            "pcie_replays": lambda h: int(self._lib.nvmlDeviceGetPcieReplayCounter(h)),
            "pcie_fatal": lambda h: self._field(h, _PCIE_FATAL),
            "nvlinks_active": self._active_links,
            "nvlink_errors": lambda h: self._field(h, _NVLINK_REPLAYS) + self._field(h, _NVLINK_RECOVERIES),
            "nvlink_crc": lambda h: sum(self._field(h, f) for f in _NVLINK_CRC),
            "fabric": self._fabric,
        }

    def devices(self) -> list[Device]:
        """Every device that the driver counts now. One that cannot even be looked up is left out: that it is missing is the finding."""
        found = []
        for index in range(self._lib.nvmlDeviceGetCount()):
            try:
                handle = self._lib.nvmlDeviceGetHandleByIndex(index)
                uuid, name = self._lib.nvmlDeviceGetUUID(handle), self._lib.nvmlDeviceGetName(handle)
            except self._lib.NVMLError:
                continue
            found.append(Device(uuid=uuid, name=name, index=index, instances=self._instances(handle)))
        return found

    def place(self, handle: Any) -> Place | None:
        """Where a device is on the PCI bus, if it tells."""
        with suppress(self._lib.NVMLError):
            pci = self._lib.nvmlDeviceGetPciInfo(handle)
            return int(pci.domain), int(pci.bus), int(pci.device)
        return None

    def _instances(self, handle: Any) -> tuple[str, ...]:
        """The UUIDs of a device's MIG instances; most devices have none, and say so with an error."""
        found = []
        with suppress(self._lib.NVMLError):
            for i in range(self._lib.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with suppress(self._lib.NVMLError):  # places that no instance fills
                    found.append(self._lib.nvmlDeviceGetUUID(self._lib.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)))
        return tuple(found)

    def driver(self) -> str:
        """The driver's version."""
        return str(self._lib.nvmlSystemGetDriverVersion())

    def handle(self, uuid: str) -> tuple[Answer, Any]:
        """Whether the device is there, and its handle: looked up by UUID each time, because indexes shift when a device is gone."""
        handles: list[Any] = []

        def look_up() -> int:
            handles.append(self._lib.nvmlDeviceGetHandleByUUID(uuid))
            return 1

        return self.answer(look_up), handles[0] if handles else None

    def ask(self, query: str, handle: Any) -> Answer:
        """Put one of `queries`."""
        return self.answer(lambda: self.queries[query](handle))

    def answer(self, call: Callable[[], int]) -> Answer:
        """A call's value, or the driver's way of not giving one."""
        try:
            return Answer(told=Told.VALUE, value=call())
        except self._lib.NVMLError as e:
            told = Told.UNSUPPORTED if e.value in NOT_SUPPORTED else Told.ERROR
            return Answer(told=told, code=int(e.value), text=str(e))
        except Exception as e:  # a driver that answers garbage: pynvml fails to decode it in ways of its own
            return Answer(told=Told.ERROR, text=f"{type(e).__name__}: {e}")

    def held(self, uuid: str) -> Held | None:
        """What is in use of a device's memory; None if it does not tell."""
        try:
            handle = self._lib.nvmlDeviceGetHandleByUUID(uuid)
            used = int(self._lib.nvmlDeviceGetMemoryInfo(handle).used)
        except self._lib.NVMLError:
            return None
        with suppress(self._lib.NVMLError):
            return Held(used=used, pids=tuple(int(p.pid) for p in self._lib.nvmlDeviceGetComputeRunningProcesses(handle)))
        return Held(used=used)

    def listen(self, handle: Any) -> Answer:
        """Have a device's XIDs told to `next_xid`."""

        def register() -> int:
            self._lib.nvmlDeviceRegisterEvents(handle, _XID_EVENT, self._events)
            return 1

        return self.answer(register)

    def next_xid(self, wait_s: float) -> tuple[str, int] | None:
        """(UUID, XID) of the next event, waiting at most `wait_s`; None if there was none. Raises NVMLError if events cannot be had."""
        try:
            event = self._lib.nvmlEventSetWait_v2(self._events, int(wait_s * 1000))
        except self._lib.NVMLError_Timeout:
            return None
        return str(self._lib.nvmlDeviceGetUUID(event.device)), int(event.eventData)

    def _field(self, handle: Any, field: int) -> int:
        value = self._lib.nvmlDeviceGetFieldValues(handle, [field])[0]
        if value.nvmlReturn:
            raise self._lib.NVMLError(value.nvmlReturn)
        wide = value.valueType in (self._lib.NVML_VALUE_TYPE_UNSIGNED_LONG, self._lib.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
        return int(value.value.ullVal if wide else value.value.uiVal)

    def _active_links(self, handle: Any) -> int:
        links = min(self._field(handle, _NVLINK_COUNT), _MOST_LINKS)
        return sum(int(self._lib.nvmlDeviceGetNvLinkState(handle, link)) for link in range(links))

    def _fabric(self, handle: Any) -> int:
        """The fabric's state in the low byte, its health mask above it."""
        info = self._lib.c_nvmlGpuFabricInfoV_t()
        self._lib.nvmlDeviceGetGpuFabricInfoV(handle, self._lib.byref(info))
        return int(info.state) | int(info.healthMask) << 8
