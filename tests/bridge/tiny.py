"""Tiny HuggingFace models with all dimensions distinct, and their own results as reference."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

ARCHITECTURES = ("llama", "qwen2", "qwen3")
VOCABULARY = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
# Lengths of the sequences in each pack: packs of different sizes, sequences equal and not.
PACKS = ((5, 9, 9, 31, 1), (23, 3, 3))


def config(kind: str, *, tied: bool = False, **fields: Any) -> Any:
    """A tiny config of one architecture."""
    make = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[kind]
    return make(**{**SIZES, "tie_word_embeddings": tied, **fields})


def model(kind: str, *, tied: bool = False, **fields: Any) -> Any:
    """A model of it with weights that no two tensors share, norms and biases included."""
    torch.manual_seed(7)
    made = transformers.AutoModelForCausalLM.from_config(config(kind, tied=tied, **fields))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return made


def save(made: Any, folder: Path, **options: Any) -> Path:
    """Write the model in HuggingFace format."""
    transformers.utils.logging.disable_progress_bar()
    made.save_pretrained(folder, **options)
    return folder


def packs() -> list[list[torch.Tensor]]:
    """The sequences of every pack, each one token longer than its inputs."""
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randint(0, VOCABULARY, (n + 1,), generator=generator) for n in lengths]
        for lengths in PACKS
    ]


@dataclass
class Reference:
    """What HuggingFace computes: logits of each pack [T, V], gradients of the mean loss."""

    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def reference(made: Any) -> Reference:
    """One sequence at a time, without padding; the loss is the mean over all tokens."""
    count = sum(map(sum, PACKS))
    logits = []
    for pack in packs():
        rows = [made(ids[None, :-1]).logits[0] for ids in pack]
        labels = torch.cat([ids[1:] for ids in pack])
        joined = torch.cat(rows)
        (torch.nn.functional.cross_entropy(joined, labels, reduction="sum") / count).backward()
        logits.append(joined.detach())
    gradients = {n: p.grad.clone() for n, p in made.named_parameters()}
    return Reference(logits, gradients)
