"""Families with experts: a parallel Megatron model computes what transformers' own class does."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge import translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.registry import architecture
from megatron_bridge.runtime.moe import Router
from tests.bridge import families_moe, parity, tiny
from tests.bridge.published_moe import PUBLISHED
from tests.ranks import run_ranks

LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
    "etp2": ParallelLayout(tp=2, etp=2),
    "ep2tp2": ParallelLayout(tp=2, dp=2, ep=2),
}
FURTHER = {
    "ep2-within-tp2": ParallelLayout(tp=2, ep=2, etp=1),
    "whole-experts-tp2": ParallelLayout(tp=2, etp=1),
    "etp2-of-dp2": ParallelLayout(dp=2, etp=2),
    "uneven-pp2": ParallelLayout(pp=2, first_stage_layers=1),
    "pp2vpp2": ParallelLayout(pp=2, vpp=2),
    "ep2pp2": ParallelLayout(pp=2, dp=2, ep=2),
}
# Variants of a table that another family proves at every layout.
_VARIANTS = ("deepseek_v2_lite", "moonlight")
_OF_VARIANTS = ("tp1", "ep2tp2")


def _cases() -> list[Any]:
    cases = []
    for kind in families_moe.CONFIGS:
        for layout in LAYOUTS | FURTHER:
            quick = layout in (_OF_VARIANTS if kind in _VARIANTS else LAYOUTS)
            marks = () if quick else (pytest.mark.slow,)
            cases.append(pytest.param(kind, layout, marks=marks))
    return cases


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], tuple[Path, parity.Wanted]]:
    known: dict[str, tuple[Path, parity.Wanted]] = {}

    def make(kind: str) -> tuple[Path, parity.Wanted]:
        if kind not in known:
            model = families_moe.model(kind)
            wanted = families_moe.wanted(model, tmp_path_factory.mktemp("gradients"))
            known[kind] = tiny.save(model, tmp_path_factory.mktemp("hf")), wanted
        return known[kind]

    return make


@pytest.mark.parametrize(("kind", "layout"), _cases())
def test_logits_gradients_and_export_equal_huggingface(made, kind, layout):
    folder, wanted = made(kind)
    shape = (LAYOUTS | FURTHER)[layout]
    parity.check(run_ranks(parity.compare, shape.world, folder, shape, wanted))


@pytest.mark.parametrize("layout", ["etp2", "ep2tp2"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_sequences_cut_over_ranks_change_nothing(made, kind, layout):
    folder, wanted = made(kind)
    shape = LAYOUTS[layout]
    parity.check(
        run_ranks(parity.compare, shape.world, folder, shape, wanted, sequence_parallel=True)
    )


def _logits(model: Any) -> torch.Tensor:
    """Of all sequences that the other tests look at."""
    with torch.no_grad():
        sequences = [ids for pack in parity.packs(model.config.vocab_size) for ids in pack]
        return torch.cat([model(ids[None, :-1]).logits[0] for ids in sequences])


@contextmanager
def _zeroed(tensor: torch.Tensor) -> Iterator[None]:
    kept = tensor.detach().clone()
    with torch.no_grad():
        tensor.zero_()
    yield
    with torch.no_grad():
        tensor.copy_(kept)


def _tensors(model: Any, ends: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """What to silence: every tensor of such a name, every expert of its own."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("mlp.experts.down_proj"):
            found |= {f"{name}[{number}]": one for number, one in enumerate(tensor)}
        elif name.endswith(ends):
            found[name] = tensor
    return found


_SILENCED = ("down_proj.weight", "shared_expert_gate.weight", "e_score_correction_bias")


@pytest.mark.parametrize("kind", families_moe.CONFIGS)
def test_every_expert_and_bias_takes_part(kind):
    model = families_moe.model(kind)
    normal = _logits(model)
    silenced = _tensors(model, _SILENCED)
    assert len(silenced) >= 12
    for name, tensor in silenced.items():
        with _zeroed(tensor):
            difference = (_logits(model) - normal).abs().max().item()
        assert difference > 1e-2, (name, difference)


_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What is said otherwise, and so must change the logits.
_CHANGES: dict[str, list[dict[str, Any]]] = {
    "mixtral": [{"num_experts_per_tok": 2}],
    "qwen2_moe": [{"norm_topk_prob": True}, {"num_experts_per_tok": 2}],
    "qwen3_moe": [{"norm_topk_prob": False}],
    "deepseek_v2": [
        {"rope_parameters": _DEFAULT_ROPE},
        {"rope_parameters": families_moe.YARN | {"mscale_all_dim": 1.0}},
        {"rope_parameters": families_moe.YARN | {"beta_fast": 4}},
        {"topk_method": "greedy"},
        {"topk_group": 1},
        {"routed_scaling_factor": 1.0},
    ],
    "deepseek_v3": [
        {"rope_parameters": _DEFAULT_ROPE},
        {"rope_parameters": families_moe.YARN | {"mscale": 0.5}},
        {"n_group": 1, "topk_group": 1},
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False},
        {"rope_interleave": False},
    ],
}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [pytest.param(kind, fields) for kind, all_ in _CHANGES.items() for fields in all_],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_every_setting_takes_part(kind, fields):
    model = families_moe.model(kind)
    other = families_moe.model(kind, **fields)
    other.load_state_dict(model.state_dict())
    assert (_logits(other) - _logits(model)).abs().max().item() > 1e-2


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_translated(name):
    config = translation.resolve(PUBLISHED[name])
    arguments = translation.transformer_arguments(config)
    moe = [architecture(config).is_moe(config, i) for i in range(config["num_hidden_layers"])]
    assert arguments["moe_layer_freq"] == (1 if all(moe) else [int(one) for one in moe])
    assert moe.index(True) == config.get("first_k_dense_replace", 0)


def test_latent_attention_scales_as_published():
    config = translation.resolve(PUBLISHED["deepseek-ai/DeepSeek-V3"])
    arguments = translation.transformer_arguments(config)
    assert arguments["rope_type"] == "yarn"
    assert arguments["rotary_scaling_factor"] == 40
    assert (arguments["mscale"], arguments["mscale_all_dim"]) == (1.0, 1.0)
    assert (arguments["moe_router_num_groups"], arguments["moe_router_group_topk"]) == (8, 4)
    plain = translation.resolve(PUBLISHED["moonshotai/Moonlight-16B-A3B"])
    arguments = translation.transformer_arguments(plain)
    assert (arguments["rope_type"], arguments["rotary_scaling_factor"]) == ("rope", 1.0)
    assert arguments["moe_router_num_groups"] is None


_V2, _V3 = "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V3"
_YARN = PUBLISHED[_V3]["rope_scaling"]


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        (_V3, {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        (_V3, {"rope_interleave": False}, "rope_interleave=False is not supported"),
        (_V3, {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        (_V3, {"num_experts_per_tok": 1}, "topk_routing_with_score_function leaves the sigmoid"),
        (_V3, {"num_experts_per_tok": 200}, "more than the 128 experts of topk_group=4 groups"),
        (_V3, {"n_group": 7}, "n_group=7 does not divide n_routed_experts=256"),
        (_V3, {"num_key_value_heads": 8}, "num_key_value_heads=8 is not supported with MLA"),
        (_V3, {"n_shared_experts": None}, "n_shared_experts=null, which must be"),
        (_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        (_V3, {"attention_bias": True}, "attention_bias=True is not supported"),
        (_V3, {"router_noise": 0.1}, "router_noise=0.1, which the bridge does not know"),
        (
            _V3,
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "MLATransformerConfig.rope_type knows 'rope' and 'yarn'",
        ),
        (_V3, {"rope_scaling": _YARN | {"attention_factor": 1.5}}, "attention_factor is not"),
        (_V3, {"rope_scaling": _YARN | {"truncate": False}}, "truncate=false is not supported"),
        (_V3, {"rope_scaling": _YARN | {"mscale": 0}}, "mscale_all_dim without mscale"),
        (_V2, {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        (_V2, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported"),
        (_V2, {"num_experts_per_tok": 65}, "must be from 1 to the number of experts, 64"),
        (
            "mistralai/Mixtral-8x7B-v0.1",
            {"num_experts_per_tok": 1},
            "topk_routing_with_score_function has no such weight",
        ),
        (
            "mistralai/Mixtral-8x7B-v0.1",
            {"router_jitter_noise": 0.1},
            "router_jitter_noise=0.1 is not supported",
        ),
        ("Qwen/Qwen3-30B-A3B", {"num_local_experts": 64}, "disagree: \\[64, 128\\]"),
        ("Qwen/Qwen3-30B-A3B", {"attention_bias": True}, "attention_bias=True is not supported"),
    ],
)
def test_what_megatron_cannot_compute_is_refused(name, fields, problem):
    with pytest.raises(ValueError, match=problem):
        translation.resolve(PUBLISHED[name] | fields)


@pytest.mark.parametrize("kind", families_moe.CONFIGS)
def test_old_and_new_configs_say_the_same(kind):
    """transformers 5 writes rotary embeddings in another form than published files have."""
    make, _ = families_moe.CONFIGS[kind]
    new = make(**families_moe.fields(kind)).to_dict()
    old = copy.deepcopy(new)
    rope = old.pop("rope_parameters")
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    resolved = [translation.resolve(config) for config in (new, old)]
    first, second = (translation.transformer_arguments(config) for config in resolved)
    assert first == second
    first, second = (translation.features(config) for config in resolved)
    assert first == second


def test_layers_that_predict_further_tokens_are_passed_over():
    config = translation.resolve(PUBLISHED[_V3])
    table = architecture(config)
    assert table.is_ignored("model.layers.61.eh_proj.weight", config)
    assert table.is_ignored("model.layers.61.mlp.experts.3.up_proj.weight", config)
    assert not table.is_ignored("model.layers.60.mlp.gate.weight", config)
    assert not table.is_ignored("model.layers.610.mlp.gate.weight", config)


def _router_dtypes(folder: Path) -> set[torch.dtype]:
    """What the routers of a bfloat16 model score a token's experts in."""
    (model,) = parity.build(folder, ParallelLayout(), torch.bfloat16)
    routers = [m for m in model.modules() if isinstance(m, Router)]
    tokens = torch.ones(3, 1, model.config.hidden_size, dtype=torch.bfloat16)
    assert {router.weight.dtype for router in routers} == {torch.bfloat16}
    return {router.gating(tokens).dtype for router in routers}


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_experts_are_chosen_in_float32_whatever_the_models_dtype(made, kind):
    folder, _ = made(kind)
    assert run_ranks(_router_dtypes, 1, folder) == [{torch.float32}]
