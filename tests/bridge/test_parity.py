"""A parallel Megatron model computes what HuggingFace computes, and exports what it loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_bridge import live
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime import parallel
from tests.bridge import tiny
from tests.ranks import run_ranks

LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "dp2": ParallelLayout(dp=2),
}


@pytest.fixture(scope="module", params=["untied", "tied"])
def tied(request) -> bool:
    return request.param == "tied"


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def made(request, tied, tmp_path_factory) -> tuple[Path, tiny.Reference]:
    model = tiny.model(request.param, tied=tied)
    folder = tiny.save(model, tmp_path_factory.mktemp("hf"))
    return folder, tiny.reference(model)


def _pack(sequences: list[torch.Tensor]) -> dict[str, Any]:
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [len(ids) - 1 for ids in sequences]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "input_ids": torch.cat([ids[:-1] for ids in sequences])[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "attention_mask": None,
        "labels": torch.cat([ids[1:] for ids in sequences])[None],
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
    }


def _run(model: torch.nn.Module, packs: list, *, train: bool) -> list[torch.Tensor]:
    """Megatron's own schedule; this rank's outputs of each pack where it is on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    count = sum(map(sum, tiny.PACKS))

    def step(packs_: Any, model_: Any) -> Any:
        pack = _pack(next(packs_))
        labels = pack.pop("labels")
        out = model_(**pack, labels=labels if train else None)
        # The schedule divides by the number of micro-batches, DDP by that of replicas.
        factor = len(packs) * parallel.layout().dp / count
        return out, lambda o: (o.sum() * factor, {"out": o.detach()})

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(packs),
        model=model,
        num_microbatches=len(packs),
        seq_length=1,
        micro_batch_size=1,
        forward_only=not train,
    )
    return [result["out"] for result in results]


def _train(model: torch.nn.Module, packs: list) -> float:
    """Forward and backward as the engine does; leaves gradients in place of the weights.

    Returns:
        Megatron's gradient norm, which counts each parameter once over all ranks.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.transformer.module import param_is_not_shared

    model.config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    ddp.zero_grad_buffer()
    _run(ddp, packs, train=True)
    once = [
        parameter.main_grad
        for parameter in model.parameters()
        if param_is_not_shared(parameter)
        and tensor_parallel.param_is_not_tensor_parallel_duplicate(parameter)
    ]
    group = parallel_state.get_model_parallel_group()
    norm = get_grad_norm_fp32(once, grad_stats_parallel_group=group)
    for parameter in model.parameters():
        parameter.data = parameter.main_grad
    return float(norm)


def _compare(
    folder: Path, layout: ParallelLayout, wanted: tiny.Reference | None
) -> dict[str, float | bool]:
    """Differences from HuggingFace, on the ranks that can see them."""
    from megatron.core import tensor_parallel

    parallel.initialize(layout, 5)
    config = live.load_hf_config(folder)
    model = live.build_model(config, layout, dtype=torch.float32)
    live.load_weights(model, folder)
    found: dict[str, float | bool] = {}
    exported = dict(live.export_weights(model, config))
    if exported:
        source = load_file(folder / "model.safetensors")
        found["same_names"] = list(exported) == list(dict.fromkeys(exported)) and set(
            exported
        ) == set(source)
        found["bit_identical"] = all(torch.equal(exported[n], source[n]) for n in source)
    if wanted is None:
        return found
    mine = slice(parallel.coordinates().dp, None, layout.dp)
    for logits, want in zip(
        _run(model, tiny.packs()[mine], train=False), wanted.logits[mine], strict=False
    ):
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)[0]
        assert whole[:, tiny.VOCABULARY :].lt(-1e29).all()
        difference = (whole[:, : tiny.VOCABULARY] - want).abs().max().item()
        found["logits"] = max(found.get("logits", 0.0), difference)
    norm = _train(model, tiny.packs()[mine])
    want_norm = torch.cat([g.flatten() for g in wanted.gradients.values()]).norm().item()
    found["norm"] = abs(norm / want_norm - 1)
    for name, gradient in live.export_weights(model, config):
        want = wanted.gradients[name]
        difference = ((gradient - want).abs().max() / want.abs().max()).item()
        found["gradients"] = max(found.get("gradients", 0.0), difference)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_gradients_and_export_equal_huggingface(made, layout):
    folder, reference = made
    results = run_ranks(_compare, LAYOUTS[layout].world, folder, LAYOUTS[layout], reference)
    assert results[0]["same_names"]
    assert results[0]["bit_identical"]
    assert results[0]["gradients"] < 1e-5
    assert max(result["norm"] for result in results) < 1e-5
    logits = [result["logits"] for result in results if "logits" in result]
    assert logits and max(logits) < 1e-4


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2"])
def test_llama_3_rope_scaling_equals_huggingface(layout, tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    model = tiny.model("llama", rope_parameters=scaling, max_position_embeddings=131072)
    folder, reference = tiny.save(model, tmp_path), tiny.reference(model)
    results = run_ranks(_compare, LAYOUTS[layout].world, folder, LAYOUTS[layout], reference)
    assert max(result.get("logits", 0.0) for result in results) < 1e-4
    assert results[0]["gradients"] < 1e-5


def _bfloat16(folder: Path, layout: ParallelLayout, wanted: tiny.Reference) -> float:
    from megatron.core import tensor_parallel

    parallel.initialize(layout)
    model = live.build_model(live.load_hf_config(folder), layout, dtype=torch.bfloat16)
    live.load_weights(model, folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    worst = 0.0
    for logits, want in zip(_run(model, tiny.packs(), train=False), wanted.logits, strict=False):
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits.float())[0]
        difference = (whole[:, : tiny.VOCABULARY] - want).norm() / want.norm()
        worst = max(worst, difference.item())
    return worst


def test_bfloat16_stays_near_huggingfaces_float32(tmp_path):
    model = tiny.model("qwen3")
    folder, reference = tiny.save(model, tmp_path), tiny.reference(model)
    with torch.no_grad():
        theirs = model.bfloat16()(tiny.packs()[0][3][None, :-1]).logits[0].float()
    start = sum(tiny.PACKS[0][:3])
    want = reference.logits[0][start : start + len(theirs)]
    rounding = ((theirs - want).norm() / want.norm()).item()
    results = run_ranks(_bfloat16, 4, folder, LAYOUTS["tp2pp2"], reference)
    assert 0 < max(results) < 2 * rounding
