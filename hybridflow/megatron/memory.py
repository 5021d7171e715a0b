"""Gives a device's memory to the rollout between training phases, and takes it back.

Gradients need no keeping: their buffers are freed and come back as zeros. Weights and optimizer
state move to the host's memory where they lie on a GPU; on a CPU they are there already.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel

from hybridflow.megatron.optimizer import ModelOptimizer
from megatron_bridge.runtime import device


@dataclass(frozen=True)
class Memory:
    """What one rank's process holds, in bytes.

    Attributes:
        held: on the GPU; on a CPU, the process's resident memory.
        peak: the most of it so far.
        released: what the last switch to the rollout gave up.
    """

    held: int
    peak: int
    released: int


def measure(released: int) -> Memory:
    """This process's memory now."""
    if device.on_gpu():
        return Memory(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), released)
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    held, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return Memory(held, max(held, peak), released)


def release(model: torch.nn.Module, optimizer: ModelOptimizer | None) -> int:
    """Free what a rollout can use; the bytes that were given up."""
    freed = 0
    if isinstance(model, DistributedDataParallel):
        buffers: list[Any] = [*cast(Any, model).buffers, *model.expert_parallel_buffers]
        freed += sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
        gpu = device.on_gpu()
        model.offload_grad_buffers(synchronize=gpu, empty_cache=gpu)
    if device.on_gpu():
        before = torch.cuda.memory_allocated()
        if optimizer is not None:
            optimizer.offload()
        _move(_core(model), torch.device("cpu"))
        torch.cuda.empty_cache()
        freed += before - torch.cuda.memory_allocated()
    return freed


def restore(model: torch.nn.Module, optimizer: ModelOptimizer | None) -> None:
    """Take back what ``release`` gave up: the same weights and state, gradients of zero."""
    if device.on_gpu():
        _move(_core(model), device.device())
        if optimizer is not None:
            optimizer.restore()
    if isinstance(model, DistributedDataParallel):
        model.restore_grad_buffers(synchronize=device.on_gpu())


def _core(model: torch.nn.Module) -> torch.nn.Module:
    """The model without Megatron's wrapper, whose ``buffers`` are those of gradients."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _move(model: torch.nn.Module, target: torch.device) -> None:
    """Move parameters' and buffers' data, keeping the objects that others refer to."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(target)
