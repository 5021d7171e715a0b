"""Memory of a GPU that other processes may open, taken from CUDA's driver.

Not from torch's allocator: parts of its blocks, and of expandable segments, cannot be shared alone,
and what torch shares it keeps until every reader counted down, which one that died never does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

_HANDLE_BYTES = 64
_GRANULE = 2 << 20
"""Smaller allocations may lie in one block, which a handle would open whole."""
_OUT_OF_MEMORY = 2


class _Handle(ctypes.Structure):
    """The driver's CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class SharedDeviceMemory:
    """At least `size` bytes on `device`.

    Attributes:
        bytes: how many there are.
        handle: with which a process on the same machine opens it, 64 bytes.
        uuid: of the GPU.
        tensor: uint8 [bytes], until `free`.

    Raises:
        RuntimeError: the GPU has no room, or does not share memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = -(-size // _GRANULE) * _GRANULE
        self.uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._device, self._pointer = device, ctypes.c_uint64()
        driver, handle = _driver(), _Handle()
        torch.cuda.empty_cache()  # what torch keeps for later is no room for others
        self._call(
            f"cuMemAlloc of {self.bytes:,} bytes",
            lambda: driver.cuMemAlloc_v2(ctypes.byref(self._pointer), ctypes.c_size_t(self.bytes)),
        )
        try:
            get = driver.cuIpcGetMemHandle
            self._call("cuIpcGetMemHandle", lambda: get(ctypes.byref(handle), self._pointer))
            self.handle = bytes(handle)
            self.tensor = torch.as_tensor(self, device=device)
        except BaseException:
            self.free()
            raise

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """How torch reads memory that is not its own, without a copy."""
        return {
            "shape": (self.bytes,),
            "typestr": "|u1",
            "data": (self._pointer.value, False),
            "strides": None,
            "version": 2,
        }

    def free(self) -> None:
        """Give it back; nobody may have it open any more, and its tensor is dead."""
        self.__dict__.pop("tensor", None)
        driver = _driver()
        self._call("cuMemFree", lambda: driver.cuMemFree_v2(self._pointer))

    def _call(self, name: str, act: Callable[[], int]) -> None:
        """The driver works in the thread's current context: torch's of this device, idle."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            status = act()
        if status == _OUT_OF_MEMORY:
            raise RuntimeError(
                f"{name}: the GPU has no room; choose a smaller roles.rollout.sync.bucket"
            )
        if status != 0:
            raise RuntimeError(f"{name} ended with CUDA's error {status}")


def _driver() -> Any:
    """CUDA's driver, which torch has loaded already."""
    return ctypes.CDLL("libcuda.so.1")
