"""Writes verl's figures: .venv-verl/bin/python tests/algorithms/make_reference_figures.py

The inputs are random but for their seed; figures and inputs go to reference_figures.json beside
this file, where a test compares them with the package's own functions.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig

FILE = Path(__file__).parent / "reference_figures.json"
GROUP, LENGTHS = 3, [3, 1, 5, 2, 4, 4]
LOSSES = {
    "ppo_clip": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}),
    "dual_clip": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1.5}),
    "gspo": ("gspo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}),
    "gspo_token": ("gspo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}),
    "gmpo": ("geo_mean", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}),
    "cispo": ("cispo", {"clip_ratio_low": 0.5, "clip_ratio_high": 0.28}),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gpg": ("gpg", {}),
}


def main() -> None:
    generator = torch.Generator().manual_seed(7)
    longest = max(LENGTHS)
    mask = (torch.arange(longest) < torch.tensor(LENGTHS)[:, None]).float()

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    logprobs = uniform(-3, -1, len(LENGTHS), longest)
    inputs = {
        "rewards": uniform(0, 1, len(LENGTHS)),
        "second": uniform(-1, 1, len(LENGTHS)),
        "advantages": uniform(-2, 2, len(LENGTHS)),
        "logprobs": logprobs,
        "old_logprobs": logprobs + uniform(-0.7, 0.7, len(LENGTHS), longest),
        "token_losses": uniform(-1, 1, len(LENGTHS), longest),
    }
    figures: dict[str, Any] = {
        "verl": version("verl"),
        "group": GROUP,
        "lengths": LENGTHS,
        "inputs": {name: tensor.tolist() for name, tensor in inputs.items()},
        "advantages": advantages(inputs, mask),
        "losses": {name: loss(inputs, mask, *LOSSES[name]) for name in LOSSES},
        "aggregation": aggregation(inputs, mask),
        "adaptive_kl": adaptive_kl(),
        "corrections": corrections(inputs, mask),
    }
    FILE.write_text(json.dumps(figures) + "\n", encoding="utf-8")


def advantages(inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> dict[str, Any]:
    """Per token, padding included, where it is 0; ``gdpo`` for responses of one token."""
    groups = np.repeat(np.arange(len(LENGTHS) // GROUP), GROUP)
    last = torch.zeros_like(mask)
    last[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = inputs["rewards"]

    def estimate(name: str, **options: Any) -> Any:
        given = {"token_level_rewards": last.clone(), "response_mask": mask, "index": groups}
        return get_adv_estimator_fn(name)(**{**given, **options})[0].tolist()

    class Discount:
        gamma = 0.9

    class Plain:
        gamma = 1.0

    one = torch.ones(len(LENGTHS), 1)
    baseline = inputs["second"][::GROUP]
    names = {"group_relative": "grpo", "rloo": "rloo", "opo": "opo"}
    found = {ours: estimate(theirs) for ours, theirs in names.items()}
    found["remax"] = estimate("remax", reward_baselines=baseline.repeat_interleave(GROUP))
    found["reinforce_pp"] = estimate("reinforce_plus_plus", config=Plain())
    found["reinforce_pp_discounted"] = estimate("reinforce_plus_plus", config=Discount())
    found["reinforce_pp_baseline"] = estimate("reinforce_plus_plus_baseline")
    found["gdpo"] = gdpo(inputs, one, groups)
    return found


def adaptive_kl() -> dict[str, Any]:
    """The coefficient after each of some measured KLs."""
    kls = [0.02, 0.005, 0.011, 0.0, 1.0, 0.0103, -0.001]
    settings = {"coef": 0.05, "target": 0.01, "horizon": 1000, "samples": 96}
    controller = core_algos.AdaptiveKLController(
        settings["coef"], settings["target"], settings["horizon"]
    )
    values = []
    for kl in kls:
        controller.update(kl, settings["samples"])
        values.append(float(controller.value))
    return {**settings, "kl": kls, "values": values}


def gdpo(inputs: dict[str, torch.Tensor], mask: torch.Tensor, groups: np.ndarray) -> Any:
    config = {"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": [1.0, 0.5]}
    found, _ = core_algos.compute_gdpo_outcome_advantage(
        token_level_rewards=torch.zeros_like(mask),
        response_mask=mask,
        index=groups,
        config=config,  # type: ignore[arg-type]
        non_tensor_batch={"first": inputs["rewards"].numpy(), "second": inputs["second"].numpy()},
        batch={
            "prompts": torch.zeros(len(mask), 2),
            "attention_mask": torch.ones(len(mask), 3).long(),
        },
    )
    return found.tolist()


def loss(
    inputs: dict[str, torch.Tensor], mask: torch.Tensor, name: str, options: dict[str, Any]
) -> dict[str, Any]:
    """The loss, averaged over a response's tokens and over responses, and its gradient."""
    settings: dict[str, Any] = {"ppo_micro_batch_size_per_gpu": 1, "ppo_mini_batch_size": 1}
    config = ActorConfig(strategy="fsdp", rollout_n=1, **settings, **options)
    logprobs = inputs["logprobs"].clone().requires_grad_()
    advantages = inputs["advantages"][:, None] * mask
    value, _ = get_policy_loss_fn(name)(
        old_log_prob=inputs["old_logprobs"],
        log_prob=logprobs,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode="seq-mean-token-mean",
        config=config,
    )
    value.backward()
    assert logprobs.grad is not None
    return {"options": options, "loss": value.item(), "gradient": logprobs.grad.tolist()}


def aggregation(inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> dict[str, float]:
    modes = {
        "token_mean": "token-mean",
        "sequence_mean_token_mean": "seq-mean-token-mean",
        "sequence_mean_token_sum": "seq-mean-token-sum",
        "constant": "seq-mean-token-sum-norm",
    }
    return {
        ours: core_algos.agg_loss(inputs["token_losses"], mask, theirs, loss_scale_factor=8).item()
        for ours, theirs in modes.items()
    }


def corrections(inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> dict[str, Any]:
    """Weights, or kept tokens; here ``logprobs`` are the trainer's, ``old_logprobs`` the rollout's.

    verl bounds the inverse ratio where it rejects.
    """
    difference = inputs["logprobs"] - inputs["old_logprobs"]
    ways = {
        "truncated token": ("token", 1.4),
        "truncated sequence_sum": ("sequence", 1.4),
        "masked token": ("token", "0.7_1.4"),
        "masked sequence_sum": ("sequence", "0.7_1.4"),
    }
    found: dict[str, Any] = {}
    for ours, (level, bounds) in ways.items():
        weights, metrics = compute_rollout_correction_weights(difference, mask, level, bounds)
        ess = metrics["rollout_is_eff_sample_size"]
        found[ours] = {"weights": weights.tolist(), "ess": ess}
    names = {"token": "token_k1", "sequence": "seq_mean_k1", "sequence_sum": "seq_sum_k1"}
    for ours, theirs in names.items():
        bounds = f"{1 / 1.2}_{1 / 0.9}"
        kept, _ = compute_rollout_rejection_mask(difference, mask, theirs, bounds)
        found[f"rejection {ours}"] = {"weights": kept.tolist()}
    return found


if __name__ == "__main__":
    main()
