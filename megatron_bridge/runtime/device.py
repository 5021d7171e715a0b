"""The one place that asks whether this process trains on a CPU or a GPU."""

import os
from functools import cache

import torch


@cache
def on_gpu() -> bool:
    """True when a CUDA device is usable. Asked once: the answer never changes in a process."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device that holds this process's parameters and activations."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def select(local_rank: int) -> None:
    """Make the GPU of this rank among its machine's ranks this process's; nothing on a CPU."""
    if on_gpu():
        torch.cuda.set_device(local_rank)


def name() -> str:
    """Of the GPU, as its maker calls it; "cpu" without one."""
    return torch.cuda.get_device_name() if on_gpu() else "cpu"


def index() -> int | None:
    """The GPU's number on this machine; None without one."""
    return visible()[torch.cuda.current_device()] if on_gpu() else None


def visible() -> list[int]:
    """Numbers on this machine of the GPUs that this process sees, in CUDA's order.

    Where CUDA_VISIBLE_DEVICES does not give numbers: how CUDA counts them here.
    """
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [int(name) for name in names if name.strip().isdigit()]
    return numbers[:count] if len(numbers) >= count else list(range(count))


def backend() -> str:
    """The torch.distributed backend that joins such devices."""
    return "nccl" if on_gpu() else "gloo"


@cache
def have_transformer_engine() -> bool:
    """True when layers can come from transformer-engine, which needs a GPU."""
    if not on_gpu():
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


def prepare() -> None:
    """Make megatron-core usable here: installs the CPU layer when there is no GPU.

    Call it before any other use of ``megatron.core`` in a process; calling it again does nothing.
    """
    if not on_gpu():
        from megatron_bridge.runtime import cpu_layer

        cpu_layer.install()


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dtype(name: str) -> torch.dtype:
    """The torch dtype of a recipe's or a checkpoint's dtype name.

    Raises:
        ValueError: for a dtype that models are not trained in.
    """
    if name not in _DTYPES:
        raise ValueError(f"dtype '{name}' is not supported; choose one of {sorted(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(value: torch.dtype) -> str:
    """The name of a supported dtype, as config.json spells it."""
    return next(name for name, known in _DTYPES.items() if known == value)
