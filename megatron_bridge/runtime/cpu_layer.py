"""Lets megatron-core train on CPU tensors over gloo.

megatron-core 0.16 names the CUDA device in some places of its training path. Each entry of
``PATCHES`` replaces one such place and states the text that must be in its source for the
replacement to make sense; an upgrade that changes the place fails loudly at ``install``.
Nothing here is installed when a GPU is usable (see ``device.prepare``).
"""

import contextlib
import logging
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_bridge.runtime import cpu_experts
from megatron_bridge.runtime.patch import CUDA_LITERAL, Patch
from megatron_bridge.runtime.rope import packed_rotary

_CPU = torch.device("cpu")


class CpuLayerError(RuntimeError):
    """megatron-core is not the one that the CPU layer was written for."""


class _TorchOnCpu:
    """Stands for the name ``torch`` in a module whose tensor factories say ``device="cuda"``."""

    _FACTORIES = frozenset({"zeros", "ones", "empty", "full", "tensor", "arange"})

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return self._factory(value) if name in self._FACTORIES else value

    @staticmethod
    def _factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
                kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return on_cpu


def _serve_literals(module: ModuleType) -> None:
    module.torch = _TorchOnCpu()  # type: ignore[attr-defined]


def _one_generator(module: ModuleType) -> None:
    """The CPU generator plays the GPU generator's part in Megatron's RNG tracker."""

    def get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]
    # The tracker warns when the CPU generator moves inside its context: here that is the point.
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _rotary_once(module: ModuleType) -> None:
    """Angles once per pack instead of once per layer and sequence."""
    module.apply_rotary_pos_emb = packed_rotary(module.apply_rotary_pos_emb)  # type: ignore[attr-defined]


def _literals(module: str) -> Patch:
    return Patch(
        name=f"literals:{module}",
        module=f"megatron.core.{module}",
        target=None,
        needles=(CUDA_LITERAL,),
        apply=_serve_literals,
        why="the module creates tensors with a literal CUDA device",
    )


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="rng",
        module="megatron.core.tensor_parallel.random",
        target="_get_cuda_rng_state",
        needles=("torch.cuda.random.get_rng_state", "graph_safe"),
        apply=_one_generator,
        why="there is one generator, the CPU's",
    ),
    Patch(
        name="rotary",
        module="megatron.core.transformer.attention",
        target="apply_rotary_pos_emb",
        needles=("_apply_rotary_pos_emb_thd", "cu_seqlens: Optional[Tensor] = None", "mscale"),
        apply=_rotary_once,
        why="the unfused form takes more time than attention itself on packs of short sequences",
    ),
    *cpu_experts.PATCHES,
    _literals("pipeline_parallel.schedules"),
    _literals("transformer.moe.moe_utils"),
    _literals("optimizer.optimizer"),
    _literals("optimizer.clip_grads"),
    _literals("optimizer.grad_scaler"),
    _literals("transformer.utils"),
    _literals("tensor_parallel.data"),
    _literals("rerun_state_machine"),
    _literals("utils"),
)


class _NullStream:
    """A CUDA stream or event where there is nothing to wait for.

    A class like the ones it stands for: other libraries name those in type annotations.
    """

    device = _CPU

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Callable[..., "_NullStream"]:
        return lambda *_args, **_kwargs: self


class _TypeName(str):
    """``torch.FloatTensor`` that also equals ``torch.cuda.FloatTensor``.

    Megatron's optimizers sort parameters by ``param.type() == 'torch.cuda.FloatTensor'``.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and _plain(self) == _plain(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _plain(type_name: str) -> str:
    return str.replace(type_name, "torch.cuda.", "torch.")


def _replace_torch_cuda() -> None:
    """``torch.cuda`` functions that megatron-core calls at some sixty places."""
    null = _NullStream()
    stubs: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _CPU,
        "synchronize": lambda *_a, **_k: None,
        "current_stream": lambda *_a, **_k: null,
        "default_stream": lambda *_a, **_k: null,
        "Stream": _NullStream,
        "Event": _NullStream,
        "stream": lambda *_a, **_k: contextlib.nullcontext(),
        "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
        "set_rng_state": lambda state, *_a, **_k: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }
    for name, stub in stubs.items():
        assert hasattr(torch.cuda, name), f"torch.cuda.{name} does not exist"
        setattr(torch.cuda, name, stub)
    torch.cuda.random.get_rng_state = stubs["get_rng_state"]  # type: ignore[assignment]


def _replace_tensor_methods() -> None:
    """``.cuda()`` stays on the CPU; ``.type()`` compares equal to the CUDA type's name."""
    original_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original_type(self, *args, **kwargs)
        return _TypeName(original_type(self))

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *_a, **_k: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_a, **_k: self  # type: ignore[method-assign]


# Said on every import or model on a CPU; each is true, expected and of no use to anyone here.
_EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "TorchScript",
    "`torch.jit.script",
    "Failed to load pynvml",
    "Context parallelism is not supported",
    "full scope is deprecated",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)


def _silence_expected_warnings() -> None:
    for text in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=f".*{text}.*")


_installed = False


def install() -> None:
    """Apply every patch once in this process.

    Raises:
        CpuLayerError: when a patch does not fit the installed megatron-core.
    """
    global _installed
    if _installed:
        return
    _silence_expected_warnings()
    problems = verify()
    if problems:
        import megatron.core

        raise CpuLayerError(
            f"megatron-core {megatron.core.__version__} differs from the 0.16 that the CPU layer "
            "serves; install megatron-core 0.16.x or adapt runtime/cpu_layer.py: "
            + "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        )
    _replace_torch_cuda()
    _replace_tensor_methods()
    for patch in PATCHES:
        patch.install()
    _installed = True


def verify() -> dict[str, str]:
    """Patches that do not fit the installed megatron-core, with the reason; empty when all do."""
    problems = {patch.name: patch.problem() for patch in PATCHES}
    return {name: problem for name, problem in problems.items() if problem is not None}
