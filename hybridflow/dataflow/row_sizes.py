"""Whether the data's longest rows fit the models, told before the first step."""

from __future__ import annotations

import json
from pathlib import Path

from hybridflow.data import PromptDataset
from hybridflow.recipe.catalogue_losses import SCORE_LOSSES
from hybridflow.recipe.plan import Plan, Stage


def check_sizes(plan: Plan, stage: Stage, dataset: PromptDataset) -> None:
    """ValueError when responses that the data brings do not fit a forward pass, or the positions
    that the model was made for."""
    if not dataset.responses:
        return
    packs = stage.pack_tokens(plan.recipe)
    role = min(packs, key=packs.__getitem__)
    row, tokens = dataset.longest()
    if any(node.options.get("loss") in SCORE_LOSSES for node in stage.graph.nodes):
        tokens += len(dataset.responses)  # a score stands behind each response's last token
    what = f"{dataset.where(row)}: the row has {tokens} tokens, its responses and their prompts"
    if tokens > packs[role]:
        raise ValueError(
            f"{what} together, more than roles.{role}.micro_batch_tokens={packs[role]}; raise "
            "that, or leave long rows out with data.max_tokens"
        )
    prompt, response = dataset.longest_parts()
    rotates = any(node.function == "rotate_responses" for node in stage.graph.nodes)
    if rotates and prompt + response - 1 > packs[role]:
        raise ValueError(
            f"{dataset.path}: the dataflow puts answers after other prompts, and its longest "
            f"prompt of {prompt} tokens and longest answer of {response} are more than "
            f"roles.{role}.micro_batch_tokens={packs[role]}; raise that, or lower "
            "data.max_prompt_tokens or data.max_tokens"
        )
    config = json.loads((Path(plan.recipe.model.path) / "config.json").read_text(encoding="utf-8"))
    positions = config.get("max_position_embeddings")
    row, tokens = dataset.longest_sample()
    if isinstance(positions, int) and tokens > positions:
        raise ValueError(
            f"{dataset.where(row)}: a prompt and its response have {tokens} tokens, and "
            f"{plan.recipe.model.path} has {positions} positions (max_position_embeddings); leave "
            f"long rows out with data.max_tokens={positions}"
        )
