"""Writes verl's figures: .venv-verl/bin/python tests/algorithms/make_critic_figures.py

What verl's functions of a critic give for random inputs; they go to critic_figures.json beside
this file, where a test compares them with the package's own functions.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import masked_whiten

FILE = Path(__file__).parent / "critic_figures.json"
LENGTHS = [3, 1, 6, 2, 5]
ESTIMATORS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "abs": "abs"}
GAMMA, LAM, CLIP, KL_COEF = 0.97, 0.9, 0.3, 0.2


def main() -> None:
    generator = torch.Generator().manual_seed(11)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).float()

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    inputs = {
        "rewards": uniform(-1, 1, shape[0]),
        "token_rewards": uniform(-1, 1, *shape) * mask,
        "values": uniform(-1, 1, *shape) * mask,
        "new_values": uniform(-1, 1, *shape) * mask,
        "logprobs": uniform(-3, -1, *shape),
        "ref_logprobs": uniform(-3, -1, *shape),
    }
    figures = {
        "verl": version("verl"),
        "lengths": LENGTHS,
        "settings": {"gamma": GAMMA, "lam": LAM, "clip": CLIP, "kl_coef": KL_COEF},
        "inputs": {name: tensor.tolist() for name, tensor in inputs.items()},
        **advantages(inputs, mask),
        "value_clip": value_loss(inputs, mask),
        "scaled": masked_whiten(inputs["token_rewards"], mask, shift_mean=False).tolist(),
        "token_rewards": token_rewards(inputs, mask),
    }
    FILE.write_text(json.dumps(figures) + "\n", encoding="utf-8")


def advantages(inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> dict[str, Any]:
    found, returns = core_algos.compute_gae_advantage_return(
        inputs["token_rewards"], inputs["values"], mask, torch.tensor(GAMMA), torch.tensor(LAM)
    )
    return {"advantages": found.tolist(), "returns": returns.tolist()}


def value_loss(inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> dict[str, Any]:
    """The mean over tokens, its gradient, and the share of tokens that are clipped."""
    values = inputs["new_values"].clone().requires_grad_()
    returns = inputs["token_rewards"]
    loss, clipped = core_algos.compute_value_loss(values, returns, inputs["values"], mask, CLIP)
    loss.backward()
    assert values.grad is not None
    return {
        "loss": loss.item(),
        "gradient": values.grad.tolist(),
        "clip_fraction": float(clipped),
    }


def token_rewards(inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> dict[str, Any]:
    """By estimator: the outcome at the last token less the penalty."""
    last = torch.zeros_like(mask)
    last[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = inputs["rewards"]
    found = {}
    for ours, theirs in ESTIMATORS.items():
        kl = core_algos.kl_penalty(inputs["logprobs"], inputs["ref_logprobs"], theirs)
        found[ours] = (last - KL_COEF * kl * mask).tolist()
    return found


if __name__ == "__main__":
    main()
