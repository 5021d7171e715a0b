"""Compares a parallel Megatron model with transformers' own: logits, gradients, exported weights.

``compare`` runs on every rank (see ``tests.ranks``); ``Wanted`` is made once by the test.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_bridge import live
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime import device, parallel

# Lengths of the sequences in each pack: packs of different sizes, sequences equal and not. The
# last sequence makes a pack's size divisible by 4, as sequence parallelism wants it.
PACKS = ((5, 9, 9, 31, 2), (23, 3, 2))
TOKENS = sum(map(sum, PACKS))


def packs(vocabulary: int) -> list[list[torch.Tensor]]:
    """The sequences of every pack, each one token longer than its inputs."""
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randint(0, vocabulary, (n + 1,), generator=generator) for n in lengths]
        for lengths in PACKS
    ]


@dataclass
class Wanted:
    """What HuggingFace computes: logits of each pack [T, V], gradients of the mean loss."""

    vocabulary: int
    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def wanted(model: Any) -> Wanted:
    """One sequence at a time, without padding; the loss is the mean over all tokens."""
    vocabulary = model.config.vocab_size
    logits = []
    for pack in packs(vocabulary):
        rows = [model(ids[None, :-1]).logits[0] for ids in pack]
        labels = torch.cat([ids[1:] for ids in pack])
        joined = torch.cat(rows)
        (torch.nn.functional.cross_entropy(joined, labels, reduction="sum") / TOKENS).backward()
        logits.append(joined.detach())
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Wanted(vocabulary, logits, gradients)


def _pack(sequences: list[torch.Tensor]) -> dict[str, Any]:
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [len(ids) - 1 for ids in sequences]
    here = device.device()
    offsets = torch.tensor([0, *lengths], device=here).cumsum(0).int()
    return {
        "input_ids": torch.cat([ids[:-1] for ids in sequences])[None].to(here),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(here),
        "attention_mask": None,
        "labels": torch.cat([ids[1:] for ids in sequences])[None].to(here),
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
    }


def run(chunks: list[torch.nn.Module], packs_: list, *, train: bool) -> list[torch.Tensor]:
    """Megatron's own schedule; this rank's outputs of each pack where it holds the last chunk."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(iterator: Any, model: Any) -> Any:
        pack = _pack(next(iterator))
        labels = pack.pop("labels")
        out = model(**pack, labels=labels if train else None)
        # The schedule divides by the number of micro-batches, DDP by that of replicas.
        factor = len(packs_) * parallel.layout().dp / TOKENS
        return out, lambda o: (o.sum() * factor, {"out": o.detach()})

    single = len(chunks) == 1
    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(packs_) if single else [iter(packs_) for _ in chunks],
        model=chunks[0] if single else chunks,
        num_microbatches=len(packs_),
        seq_length=1,
        micro_batch_size=1,
        forward_only=not train,
    )
    return [result["out"] for result in results]


def train(chunks: list[torch.nn.Module], packs_: list) -> float:
    """Forward and backward as an engine does; leaves gradients in place of the weights.

    Returns:
        Megatron's gradient norm, which counts each parameter once over all ranks.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    config: Any = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig()
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=place > 0)
        for place, chunk in enumerate(chunks)
    ]
    for one in wrapped:
        one.zero_grad_buffer()
    run(wrapped, packs_, train=True)
    norm = _norm(chunks)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad.to(parameter.dtype)  # type: ignore[attr-defined]
    return norm


def _norm(chunks: list[torch.nn.Module]) -> float:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.transformer.module import param_is_not_shared

    parameters = [p for chunk in chunks for p in chunk.parameters() if param_is_not_shared(p)]

    def norm(expert: bool, group: Any) -> float:
        once = [
            p.main_grad  # type: ignore[attr-defined]
            for p in parameters
            if (not getattr(p, "allreduce", True)) == expert
            and tensor_parallel.param_is_not_tensor_parallel_duplicate(p)
        ]
        return float(get_grad_norm_fp32(once, grad_stats_parallel_group=group))

    dense = norm(False, parallel_state.get_model_parallel_group())
    experts = norm(True, parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return (dense**2 + experts**2) ** 0.5


def build(
    folder: Path, layout: ParallelLayout, dtype: torch.dtype = torch.float32, **options: Any
) -> list:
    """This rank's model chunks with the folder's weights."""
    parallel.initialize(layout, 5)
    chunks = live.build_chunks(live.load_hf_config(folder), layout, dtype=dtype, **options)
    live.load_weights(chunks, folder)
    return chunks


def mine(packs_: list) -> list:
    """This data-parallel rank's packs."""
    return packs_[parallel.coordinates().dp :: parallel.layout().dp]


def logits_of(chunks: list[torch.nn.Module], vocabulary: int) -> list[torch.Tensor]:
    """Logits [T, V] of this rank's packs, on ranks that hold the last chunk."""
    from megatron.core import tensor_parallel

    found = []
    for logits in run(chunks, mine(packs(vocabulary)), train=False):
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)[0]
        assert whole[:, vocabulary:].lt(-1e29).all()
        found.append(whole[:, :vocabulary])
    return found


def compare(
    folder: Path,
    layout: ParallelLayout,
    want: Wanted,
    *,
    gradients: bool = True,
    **options: Any,
) -> dict[str, float | bool]:
    """Differences from HuggingFace, on the ranks that can see them.

    Args:
        options: further ones of ``live.build_chunks``.

    Returns:
        ``same_names`` and ``bit_identical`` of the export and ``gradients`` (relative to each
        tensor's largest) on rank 0; ``logits`` (absolute) where the last stage is; ``norm``
        (relative) everywhere.
    """
    chunks = build(folder, layout, **options)
    config = live.load_hf_config(folder)
    found: dict[str, float | bool] = {}
    exported = {n: t.cpu().clone() for n, t in live.export_weights(chunks, config)}
    if exported:
        source = read_all(folder)
        found["same_names"] = set(exported) == set(source)
        found["bit_identical"] = found["same_names"] and all(
            exported[n].dtype == source[n].dtype and torch.equal(exported[n], source[n])
            for n in source
        )
    for logits, reference in zip(
        logits_of(chunks, want.vocabulary), mine(want.logits), strict=False
    ):
        difference = (logits.cpu() - reference).abs().max().item()
        found["logits"] = max(found.get("logits", 0.0), difference)
    if gradients:
        norm = train(chunks, mine(packs(want.vocabulary)))
        every = torch.cat([g.flatten() for g in want.gradients.values()])
        reference = every.double().norm().item()  # float32 loses digits over so many
        found["norm"] = abs(norm / reference - 1)
        for name, gradient in live.export_weights(chunks, config):
            if name in want.gradients:  # buffers have none
                reference = want.gradients[name]
                scale = reference.abs().max().clamp_min(1e-12)
                difference = ((gradient.cpu() - reference).abs().max() / scale).item()
                found["gradients"] = max(found.get("gradients", 0.0), difference)
    return found


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def check(results: list[dict[str, float | bool]], *, gradients: bool = True) -> None:
    """Assert that every rank's differences from ``compare`` are those of rounding alone."""
    assert results[0]["same_names"]
    assert results[0]["bit_identical"]
    logits = [result["logits"] for result in results if "logits" in result]
    assert logits and max(logits) < 1e-4, logits
    if gradients:
        assert 0 < results[0]["gradients"] < 1e-5, results[0]
        assert max(result["norm"] for result in results) < 1e-5
