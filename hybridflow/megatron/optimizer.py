"""Megatron's AdamW on this rank's parameters, with the learning rate of each step."""

import math

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from hybridflow.megatron.config import OptimizerSettings
from hybridflow.megatron.schedule import learning_rate


class ModelOptimizer:
    """Optimizer steps, counted from 0, over a data-parallel model.

    Attributes:
        steps: optimizer steps taken so far.
    """

    def __init__(self, model: DistributedDataParallel, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.steps = 0
        self._model = model
        dtype = next(model.parameters()).dtype
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
        )
        optimizer = get_megatron_optimizer(config, [model])
        assert isinstance(optimizer, ChainedOptimizer)
        self._optimizer = optimizer
        # One optimizer of the parameters that all data-parallel ranks hold, one of those that
        # experts have to themselves, where there are such.
        self._parts: list[torch.optim.Optimizer] = [
            part.optimizer for part in optimizer.chained_optimizers
        ]
        for part in self._parts:
            if isinstance(part, torch.optim.AdamW):
                for group in part.param_groups:  # one pass over memory instead of ten
                    group["fused"], group["foreach"] = True, False

    def zero_grad(self) -> None:
        """Clears gradients and their buffers."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, scale: float = 1.0) -> tuple[float, float]:
        """Clips the gradients and moves the parameters; gradient norm before clipping, and rate.

        Args:
            scale: of the schedule's learning rate.

        Raises:
            FloatingPointError: the gradient norm is not finite, on every rank; nothing has moved.
        """
        optimizer = self._optimizer
        overflow = optimizer.prepare_grads()
        assert not overflow, "only a loss scaler reports this, and there is none"
        grad_norm = float(optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm}")
        if self.settings.clip_grad > 0:
            for part in optimizer.chained_optimizers:
                parameters: list[Tensor] = list(part.get_parameters())
                clip_grad_by_total_norm_fp32(parameters, self.settings.clip_grad, grad_norm)
        rate = self._set_rates(scale)
        optimizer.step_with_ready_grads()
        self.steps += 1
        return grad_norm, rate

    def rate(self, scale: float = 1.0) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.settings, self.steps) * scale

    def offload(self) -> None:
        """Move the optimizer's tensors from the GPU to the host; nothing else may be called
        before ``restore``."""
        self._optimizer.offload_to_cpu()

    def restore(self) -> None:
        """Undo ``offload``."""
        self._optimizer.restore_from_cpu()

    def _set_rates(self, scale: float) -> float:
        rate = self.rate(scale)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]
        return rate

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the optimizer by ``kind/parameter name``: both moments, Adam's step
        counter and, beside 16-bit parameters, their 32-bit originals.

        Some implementations of Adam count steps once a group: ``step/group 0`` and so on.
        """
        tensors: dict[str, Tensor] = {}
        owners = self._owners()
        for name, parameter, main in self._parameters():
            if main is not parameter:
                tensors[f"main/{name}"] = main.data
            for kind, value in owners[main].state.get(main, {}).items():
                tensors[f"{kind}/{name}"] = value
        for place, group in enumerate(self._optimizer.param_groups):
            if "step" in group:
                tensors[f"step/group {place}"] = torch.tensor(int(group["step"]))
        return tensors

    def load_state(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Takes what ``state`` gave; copies, so that parameters share nothing with ``tensors``."""
        self.steps = steps
        kinds_of: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            kinds_of.setdefault(name, {})[kind] = tensor
        owners = self._owners()
        for name, parameter, main in self._parameters():
            found = kinds_of.get(name, {})
            if main is not parameter:
                main.data.copy_(found.pop("main"))
            owners[main].state[main] = {
                kind: tensor.to(main.device, copy=True) for kind, tensor in found.items()
            }
        for place, group in enumerate(self._optimizer.param_groups):
            if f"group {place}" in kinds_of:
                group["step"] = int(kinds_of[f"group {place}"]["step"])

    def _owners(self) -> dict[Tensor, torch.optim.Optimizer]:
        """Which optimizer moves a parameter."""
        return {
            parameter: part
            for part in self._parts
            for group in part.param_groups
            for parameter in group["params"]
        }

    def _parameters(self) -> list[tuple[str, Tensor, Tensor]]:
        """Name, parameter, and what the optimizer moves in its place."""
        return [
            (name, parameter, getattr(parameter, "main_param", parameter))
            for name, parameter in self._model.module.named_parameters()
        ]
