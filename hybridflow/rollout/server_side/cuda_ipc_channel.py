"""The receiving end of a stream of buckets that never leave a GPU; see `weight_sync.cuda_ipc`.

The stream's mapped file holds no bucket. For each one its sender writes there which memory of the
GPU holds it: JSON with a CUDA IPC handle. The driver's own functions open it: a handle is the same
64 bytes whatever torch either side runs, and closing it is exact, which the sender waits for before
it frees the memory.
"""

from __future__ import annotations

import base64
import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __package__:
    from hybridflow.rollout.server_side.shared_memory_channel import (
        SharedMemoryChannel,
        open_channel,
    )
    from hybridflow.rollout.server_side.sync_files import LoadFault
else:  # inside SGLang, this folder is on the path and the project is not
    from shared_memory_channel import SharedMemoryChannel, open_channel
    from sync_files import LoadFault

KIND = "cuda_ipc"
ROOM = 4096
"""Bytes that tell where a bucket is, blanks at their end."""
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # the one value that the driver knows
_FIELDS = {"kind": str, "device": str, "handle": str, "bytes": int}


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that a sender offers.

    Attributes:
        device: UUID of its GPU.
        handle: the driver's, of 64 bytes.
        bytes: of the memory.
    """

    device: str
    handle: bytes
    bytes: int


def read_message(text: bytes, stream: str) -> DeviceMemory:
    """What a sender wrote into `ROOM` bytes; LoadFault for anything but the four fields."""
    fault = LoadFault(f"stream {stream}: its sender does not say where a bucket is.")
    try:
        told = json.loads(text)
    except ValueError as error:
        raise fault from error
    if not isinstance(told, dict) or {key: type(value) for key, value in told.items()} != _FIELDS:
        raise fault
    try:
        handle = base64.b64decode(told["handle"], validate=True)
    except ValueError as error:
        raise fault from error
    if told["kind"] != KIND or len(handle) != _HANDLE_BYTES or told["bytes"] < 1:
        raise fault
    return DeviceMemory(told["device"], handle, told["bytes"])


class CudaIpcChannel:
    """Receives the buckets of one stream in order, as memory of `device`."""

    def __init__(self, told: SharedMemoryChannel, name: str, device: torch.device) -> None:
        self._told, self._name, self._device = told, name, device
        self._opened: dict[DeviceMemory, _Opened] = {}

    def receive(self, number: int, count: int) -> Tensor:
        """Bucket `number`, uint8 [count] on the device, valid until it is released.

        Raises:
            LoadFault: it is not on this device, or larger than its memory; see
                `SharedMemoryChannel.receive`.
        """
        text = bytes(self._told.receive(number, ROOM).numpy())
        memory = read_message(text, self._name)
        here = str(torch.cuda.get_device_properties(self._device).uuid)
        if memory.device != here:
            raise LoadFault(
                f"bucket {number} of stream {self._name} is on GPU {memory.device}, and this rank "
                f"on {here}."
            )
        if count > memory.bytes:
            raise LoadFault(
                f"bucket {number} of stream {self._name} has {count} bytes, its memory "
                f"{memory.bytes}."
            )
        if memory not in self._opened:
            if len(self._opened) == 2:
                raise LoadFault(f"stream {self._name} has a third memory; two are agreed.")
            self._opened[memory] = _Opened(memory, self._device)
        return self._opened[memory].tensor[:count]

    def release(self, number: int) -> None:
        """The sender may fill this bucket's memory again: all copies out of it are over."""
        torch.cuda.current_stream(self._device).synchronize()
        self._told.release(number)

    def close(self) -> None:
        """Let the memory go; then the sender, which may free it, hears that this side stopped."""
        try:
            for opened in self._opened.values():
                opened.close()
        finally:
            self._opened.clear()
            self._told.close()


def open_device_channel(
    stream: dict[str, Any], folder: Path, seconds: float, device: torch.device
) -> CudaIpcChannel:
    """The channel that a request's `stream` describes; LoadFault where parameters are on no GPU."""
    if device.type != "cuda":
        raise LoadFault(
            f"stream {stream['name']} is on a GPU, the server's parameters on {device}."
        )
    told = open_channel({**stream, "area": ROOM}, folder, seconds)
    return CudaIpcChannel(told, stream["name"], device)


class _Handle(ctypes.Structure):
    """The driver's CUipcMemHandle, which it takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Opened:
    """A sender's memory as a tensor of this process, uint8 [bytes], until it is closed."""

    def __init__(self, memory: DeviceMemory, device: torch.device) -> None:
        self._device, self._size, self._pointer = device, memory.bytes, ctypes.c_uint64()
        handle = _Handle.from_buffer_copy(memory.handle)
        driver = _driver()
        self._call(
            "cuIpcOpenMemHandle",
            lambda: driver.cuIpcOpenMemHandle_v2(
                ctypes.byref(self._pointer), handle, ctypes.c_uint(_LAZY_PEER_ACCESS)
            ),
        )
        self.tensor = torch.as_tensor(self, device=device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """How torch reads memory that is not its own, without a copy."""
        return {
            "shape": (self._size,),
            "typestr": "|u1",
            "data": (self._pointer.value, False),
            "strides": None,
            "version": 2,
        }

    def close(self) -> None:
        """Let the memory go; its tensor is dead afterwards."""
        del self.tensor
        driver = _driver()
        self._call("cuIpcCloseMemHandle", lambda: driver.cuIpcCloseMemHandle(self._pointer))

    def _call(self, name: str, act: Callable[[], int]) -> None:
        """The driver works in the thread's current context: torch's of this device, idle."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            status = act()
        if status != 0:
            raise LoadFault(f"{name} ended with CUDA's error {status}.")


def _driver() -> Any:
    """CUDA's driver, which torch has loaded already."""
    return ctypes.CDLL("libcuda.so.1")
