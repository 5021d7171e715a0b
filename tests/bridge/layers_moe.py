"""Tiny models of Megatron's own, with experts and latent attention, on any layout of ranks."""

import zlib
from typing import Any

import torch

from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime.features import Features

VOCABULARY, LAYERS, EXPERTS = 96, 4, 4
# Lengths of the sequences of each pack; odd totals, so that tokens do not divide over ranks.
PACKS = ((5, 9, 9, 7, 1), (11, 3, 3), (2, 19), (13, 4))
COMMON: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 48,
    "ffn_hidden_size": 40,
    "num_attention_heads": 4,
    "num_moe_experts": EXPERTS,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_shared_expert_intermediate_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_layer_freq": [0, 1, 1, 0],
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10,
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale_all_dim": 0.7,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 2.5,
}
KINDS: dict[str, dict[str, Any]] = {
    "experts": {
        "num_query_groups": 2,
        "kv_channels": 16,
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": True,
    },
    "latent": LATENT,
    "latent_whole_queries": LATENT | {"q_lora_rank": None, "rope_type": "rope"},
}
FEATURES = Features(router_group_experts=1, latent_norm_eps=1e-4)


def config_of(kind: str, layout: ParallelLayout, **options: Any) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    arguments = COMMON | KINDS[kind] | options
    make: Any = MLATransformerConfig if "multi_latent_attention" in arguments else TransformerConfig
    config = make(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=layout.pp > 1,
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        **arguments,
    )
    config.bridge = FEATURES
    return config


def chunks_of(config: Any, layout: ParallelLayout) -> list[torch.nn.Module]:
    """This rank's model chunks with weights that depend on their names alone."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel

    from megatron_bridge.runtime.specs import layer_spec

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    chunks = []
    for number in range(layout.vpp):
        stage = number if layout.vpp > 1 else None
        ends = {"ignore_virtual": False, "vp_stage": stage}
        model = GPTModel(
            config,
            layer_spec(config, stage),  # type: ignore[arg-type]
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=stage,
        )
        chunks.append(model)
    with torch.no_grad():
        for name, parameter in named(chunks):
            parameter.copy_(_mine(whole(name, parameter), name, parameter))
    return chunks


def named(chunks: list[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Parameters and the balancing biases, by their names in the whole model."""
    from megatron.core import parallel_state

    found = []
    first = parallel_state.get_expert_model_parallel_rank() * (
        EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    )
    for model in chunks:
        biases = [(n, b) for n, b in model.named_buffers() if n.endswith("expert_bias")]
        for local, tensor in [*model.named_parameters(), *biases]:
            parts = local.split(".")
            if "layers" in parts:
                at = parts.index("layers") + 1
                parts[at] = str(model.decoder.layers[int(parts[at])].layer_number - 1)  # type: ignore[union-attr,index]
            if "local_experts" in parts:
                at = parts.index("local_experts") + 1
                parts[at] = str(int(parts[at]) + first)
            found.append((".".join(parts), tensor))
    return found


def _cut(name: str, tensor: torch.Tensor) -> tuple[int | None, int, int]:
    """Dimension that is cut (None: none), in how many parts, and which is this rank's."""
    from megatron.core import parallel_state

    state: Any = parallel_state
    if not getattr(tensor, "tensor_model_parallel", False):
        return None, 1, 0
    dimension = tensor.partition_dim  # type: ignore[attr-defined]
    if "local_experts" in name:
        return (
            dimension,
            state.get_expert_tensor_parallel_world_size(),
            state.get_expert_tensor_parallel_rank(),
        )
    return (
        dimension,
        state.get_tensor_model_parallel_world_size(),
        state.get_tensor_model_parallel_rank(),
    )


def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    dimension, parts, _ = _cut(name, tensor)
    shape = list(tensor.shape)
    if dimension is not None:
        shape[dimension] *= parts
    made = torch.randn(shape, generator=generator) * 0.15
    return made + 1 if "norm" in name else made


def _mine(whole: torch.Tensor, name: str, tensor: torch.Tensor) -> torch.Tensor:
    dimension, parts, rank = _cut(name, tensor)
    if dimension is None:
        return whole
    if "linear_fc1" in name:
        return torch.cat([half.chunk(parts)[rank] for half in whole.chunk(2)])
    return whole.chunk(parts, dimension)[rank]


def _pack(lengths: tuple[int, ...], fill: int = 1) -> tuple[dict[str, Any], torch.Tensor]:
    """A pack's inputs, and the weight of each output; filled up to a multiple of ``fill``."""
    from megatron.core.packed_seq_params import PackedSeqParams

    real = sum(lengths)
    lengths += (-real % fill,) if real % fill else ()
    generator = torch.Generator().manual_seed(sum(lengths[:2]))
    ids = torch.randint(0, VOCABULARY, (real,), generator=generator)
    weights = torch.randn(real, generator=generator)
    missing = sum(lengths) - real
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "input_ids": torch.nn.functional.pad(ids, (0, missing))[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "attention_mask": None,
        "labels": torch.nn.functional.pad(ids.flip(0), (0, missing))[None],
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
    }, torch.nn.functional.pad(weights, (0, missing))


Results = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


def train(kind: str, layout: ParallelLayout, options: dict[str, Any]) -> tuple[Any, Results]:
    """Forward and backward over this rank's packs: per-token losses, and gradients by name."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = config_of(kind, layout, **options)
    chunks = chunks_of(config, layout)
    config.finalize_model_grads_func = finalize_model_grads
    wrapped: list[Any] = [
        DistributedDataParallel(config, DistributedDataParallelConfig(), m) for m in chunks
    ]
    for one in wrapped:
        one.zero_grad_buffer()
    mine = PACKS[parallel_state.get_data_parallel_rank() :: layout.dp]
    fill = layout.tp if config.sequence_parallel else 1

    def step(packs: Any, model: Any) -> Any:
        pack, weights = _pack(next(packs), fill)
        factor = len(mine) * layout.dp
        return model(**pack), lambda out: ((out[0] * weights).sum() * factor, {"out": out.detach()})

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(mine) for _ in wrapped],
        model=wrapped,
        num_microbatches=len(mine),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    outputs = [r["out"][0][: sum(n)] for r, n in zip(results, mine, strict=False)]
    gradients = {n: p.main_grad for n, p in named(chunks) if hasattr(p, "main_grad")}  # type: ignore[attr-defined]
    return chunks, (outputs, gradients)


def reference(kind: str, options: dict[str, Any]) -> Results:
    chunks, results = train(kind, ParallelLayout(), options)
    used = [
        module.local_tokens_per_expert
        for module in chunks[0].modules()
        if hasattr(module, "local_tokens_per_expert")
    ]
    assert all(count is None or not count.any() for count in used)  # reset after the step
    return results


def compare(
    kind: str, layout: ParallelLayout, options: dict[str, Any], wanted: Results
) -> dict[str, float]:
    """Largest relative differences from one rank's losses and gradients."""
    from megatron.core import parallel_state

    chunks, (outputs, gradients) = train(kind, layout, options)
    mine = wanted[0][parallel_state.get_data_parallel_rank() :: layout.dp]
    found = {"losses": 0.0, "gradients": 0.0}
    for output, want in zip(outputs, mine, strict=False):
        found["losses"] = max(found["losses"], (output - want).abs().max().item())
    parameters = dict(named(chunks))
    for name, gradient in gradients.items():
        want = _mine(wanted[1][name], name, parameters[name])
        difference = ((gradient - want).abs().max() / wanted[1][name].abs().max()).item()
        if difference > found["gradients"]:
            found = found | {"gradients": difference, "worst": name}  # type: ignore[dict-item]
    return found
