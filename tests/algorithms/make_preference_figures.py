"""Writes TRL's figures: .venv-trl/bin/python tests/algorithms/make_preference_figures.py

TRL's own loss functions, given log-probabilities: those that look at a model are given one that
answers with them. Inputs and figures go to preference_figures.json beside this file, where a test
compares them with the package's functions.
"""

import json
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

FILE = Path(__file__).parent / "preference_figures.json"
LENGTHS = [3, 5, 1, 4, 6, 2]  # of three pairs: chosen, rejected, chosen ...
LABELS = [True, False, False, True, True, False]
BETA, GAMMA, WEIGHTS = 0.3, 0.4, (1.5, 0.8)


def main() -> None:
    generator = torch.Generator().manual_seed(11)

    def logprobs() -> list[list[float]]:
        return [(-0.2 - 2 * torch.rand(n, generator=generator)).tolist() for n in LENGTHS]

    inputs = {name: logprobs() for name in ("policy", "reference", "drift", "drift_reference")}
    figures = {
        "trl": version("trl"),
        "settings": {"beta": BETA, "gamma": GAMMA, "weights": WEIGHTS},
        "labels": LABELS,
        "inputs": inputs,
        "losses": {
            "dpo": of_pairs("sigmoid", inputs),
            "ipo": of_pairs("ipo", inputs),
            "orpo": orpo(inputs),
            "simpo": simpo(inputs),
            "kto": kto(inputs),
        },
    }
    FILE.write_text(json.dumps(figures) + "\n", encoding="utf-8")


def padded(rows: list[list[float]]) -> torch.Tensor:
    """[S, longest]: 0 behind a row's end."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0.0] * (longest - len(row)) for row in rows])


def measured(values: torch.Tensor) -> SimpleNamespace:
    """What TRL's models answer; only the log-probabilities matter here."""
    return SimpleNamespace(
        log_probs=values,
        entropy=torch.zeros_like(values),
        mean_logits=torch.zeros_like(values),
        is_top1=torch.zeros_like(values, dtype=torch.bool),
    )


def trainer(**attributes: Any) -> SimpleNamespace:
    """What the loss functions read of their trainer."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    common = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=False),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "beta": BETA,
        "label_smoothing": 0.0,
        "precompute_ref_logps": True,
    }
    return SimpleNamespace(**(common | attributes))


def batch_of(values: torch.Tensor, rows: list[list[float]]) -> dict[str, torch.Tensor]:
    """Token ids and the mask of completions, one prompt token before each."""
    mask = (torch.arange(values.shape[1]) < torch.tensor(list(map(len, rows)))[:, None]).long()
    mask = torch.cat([torch.zeros(len(rows), 1, dtype=torch.long), mask], dim=1)
    ones = torch.ones_like(mask)
    return {"input_ids": ones, "attention_mask": ones, "completion_mask": mask}


def of_pairs(loss_type: str, inputs: dict[str, list[list[float]]]) -> dict[str, float]:
    """DPOTrainer's loss and metrics."""
    order = [0, 2, 4, 1, 3, 5]  # the chosen ones first
    policy = [inputs["policy"][i] for i in order]
    reference = padded([inputs["reference"][i] for i in order]).sum(1).chunk(2)
    values = padded(policy)
    me = trainer(
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=[loss_type],
        loss_weights=[1.0],
    )
    batch = batch_of(values, policy)
    batch |= {"ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1]}
    loss = DPOTrainer._compute_loss(me, lambda **_: measured(values), batch, False)
    found = me._metrics["eval"]
    names = {"reward_margin": "rewards/margins", "reward_accuracy": "rewards/accuracies"}
    return {"loss": loss.item()} | {ours: found[theirs][0] for ours, theirs in names.items()}


def means(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean log-probability of the chosen and of the rejected responses."""
    values = torch.tensor([sum(row) / len(row) for row in rows])
    return values[0::2], values[1::2]


def orpo(inputs: dict[str, list[list[float]]]) -> dict[str, float]:
    """ORPOTrainer's: the likelihood of the chosen less its term of odds."""
    chosen, rejected = means(inputs["policy"])
    losses, *_, log_odds = ORPOTrainer.odds_ratio_loss(trainer(), chosen, rejected)
    return {"loss": (-chosen - losses).mean().item(), "log_odds": log_odds.item()}


def simpo(inputs: dict[str, list[list[float]]]) -> dict[str, float]:
    """CPOTrainer's with loss_type simpo."""
    me = trainer(alpha=0.0, loss_type="simpo", simpo_gamma=GAMMA)
    losses, *_ = CPOTrainer.cpo_loss(me, *means(inputs["policy"]))
    return {"loss": losses.mean().item()}


def kto(inputs: dict[str, list[list[float]]]) -> dict[str, float]:
    """KTOTrainer's, its KL from the drift's log-probabilities."""
    values = padded(inputs["policy"])
    me = trainer(
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=WEIGHTS[0],
        undesirable_weight=WEIGHTS[1],
        _compute_kl_logps=lambda model, batch: padded(inputs["drift"]).sum(1),
    )
    batch = batch_of(values, inputs["policy"]) | {
        "label": torch.tensor(LABELS),
        "ref_logps": padded(inputs["reference"]).sum(1),
        "ref_KL_logps": padded(inputs["drift_reference"]).sum(1),
    }
    loss = KTOTrainer._compute_loss(me, lambda **_: measured(values), batch, False)
    return {"loss": loss.item(), "kl_baseline": me._metrics["eval"]["kl"][0]}


if __name__ == "__main__":
    main()
