"""Parallel layouts in a recipe: experts, uneven stages, and what a model cannot be cut into."""

import json
from pathlib import Path

import pytest

from hybridflow.recipe.checks import check_file
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.explain import explain
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.served import LOCAL, SERVED
from megatron_bridge.layout import ParallelLayout

from .conftest import CONFIG, RECIPE, write_weights

MOE = {
    **CONFIG,
    "tie_word_embeddings": False,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


SUPERVISED = """\
name: supervised
model: {path: model}
cluster: {devices_per_node: 12}
data: {train: train.jsonl, max_prompt_tokens: 8, prompts_per_step: 4}
steps: 5
roles:
  actor:
    parallel: {dp: 2}
    optimizer: {lr: 1e-3}
dataflow:
  inputs: [prompts, targets]
  nodes:
    update: {role: actor, call: update, in: [prompts, {responses: targets}], loss: cross_entropy}
"""


@pytest.fixture
def experts(workspace: Path) -> Path:
    """The workspace with a model that has experts, and a recipe that samples nothing."""
    return use(workspace, MOE)


def use(workspace: Path, config: dict) -> Path:
    model = workspace / "model"
    (model / "config.json").write_text(json.dumps(config))
    write_weights(model, config)
    Path("recipe.yaml").write_text(SUPERVISED)
    return workspace


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", overrides)[1]]


def test_every_size_reaches_the_layout(workspace: Path):
    sizes = "{tp: 4, pp: 3, dp: 2, ep: 4, etp: 2, first_stage_layers: 1, last_stage_layers: 1}"
    overrides = [f"roles.actor.parallel={sizes}", "roles.reference.parallel={dp: 2, ep: 2}"]
    recipe = load_recipe("recipe.yaml", overrides)
    assert recipe.layout("actor") == ParallelLayout(
        tp=4, pp=3, dp=2, ep=4, etp=2, first_stage_layers=1, last_stage_layers=1
    )
    assert recipe.layout("reference") == ParallelLayout(dp=2, ep=2)
    assert load_recipe("recipe.yaml").layout("actor") == ParallelLayout(dp=2)


@pytest.mark.parametrize(
    "parallel",
    [
        "{dp: 2, ep: 2}",
        "{tp: 2, ep: 2, etp: 1}",
        "{tp: 2, dp: 2, ep: 2}",
        "{dp: 2, etp: 2}",
        "{pp: 2, dp: 2, ep: 2, first_stage_layers: 1}",
        "{pp: 3, first_stage_layers: 1, last_stage_layers: 1}",
    ],
)
def test_layouts_of_experts_are_sound(experts: Path, parallel: str):
    assert faults_of(f"roles.actor.parallel={parallel}") == []


FAULTS = [
    ("{dp: 4, ep: 4}", "ep=4 does not divide the number of experts=6", "from [1, 2, 3, 6]"),
    ("{dp: 2, ep: 3}", "etp*ep=1*3 does not divide tp*dp=1*2", "choose ep from [1, 2]"),
    ("{dp: 2, etp: 4}", "etp=4 does not divide tp*dp=1*2", "choose etp from [1, 2]"),
    ("{dp: 4, etp: 3}", "etp=3 does not divide tp*dp=1*4", "choose etp from [1, 2, 4]"),
    ("{pp: 2, first_stage_layers: 4}", "leave 0 of num_hidden_layers=4", "needs a layer"),
    ("{pp: 3, first_stage_layers: 1}", "3 layers do not divide over the 2", "change one"),
    ("{first_stage_layers: 2}", "need pp greater than 1", "leave them out"),
    ("{dp: 2, ep: 2147483647}", "etp*ep=1*2147483647", "choose ep from [1, 2]"),
]


@pytest.mark.parametrize(("parallel", "what", "fix"), FAULTS)
def test_what_cannot_be_cut_is_a_fault_with_its_line(
    experts: Path, parallel: str, what: str, fix: str
):
    Path("recipe.yaml").write_text(SUPERVISED.replace("parallel: {dp: 2}", f"parallel: {parallel}"))
    found = [fault for fault in faults_of() if "roles.actor: " in fault and what in fault]
    assert len(found) == 1, faults_of()
    message, _, mending = found[0].partition(" Fix: ")
    assert message.startswith("recipe.yaml:8: roles.actor: ") and fix in mending, found


def test_all_faults_of_a_layout_at_once(experts: Path):
    overrides = ("roles.actor.parallel={tp: 3, pp: 3, dp: 4, ep: 4}", "cluster.devices_per_node=99")
    found = faults_of(*overrides)
    assert len(found) == 4, found
    for what in ("tp=3 does not", "pp=3 does not", "ep=4 does not", "etp=3 does not"):
        assert any(what in fault for fault in found), found


@pytest.mark.parametrize("size", ["ep", "etp"])
def test_sizes_of_experts_need_experts(workspace: Path, size: str):
    (found,) = faults_of(f"roles.actor.parallel={{dp: 2, {size}: 2}}")
    assert f"roles.actor: {size}=2 needs a model with experts, and this one has none" in found
    assert f"Fix: leave {size} out" in found


def test_latent_attention(workspace: Path):
    latent = {k: v for k, v in CONFIG.items() if k != "head_dim"} | LATENT
    use(workspace, latent)
    assert faults_of("roles.actor.parallel={tp: 2, dp: 2, ep: 4, etp: 1}") == []
    (found,) = faults_of("roles.actor.parallel={tp: 4, etp: 1}")
    assert "tp=4 does not divide num_attention_heads=6" in found


def test_explain_shows_experts_and_stages(experts: Path):
    text = explain(compile_recipe(load_recipe("recipe.yaml")))
    assert "actor: tp 1 x pp 1 x dp 2 = 2 rank(s)\n" in text
    sizes = "{tp: 2, pp: 2, dp: 2, ep: 2, etp: 1, last_stage_layers: 1}"
    text = explain(compile_recipe(load_recipe("recipe.yaml", [f"roles.actor.parallel={sizes}"])))
    assert (
        "actor: tp 2 x pp 2 x dp 2 = 8 rank(s); experts of a stage: etp 1 x ep 2, 2 replica(s); "
        "last stage: 1 layer(s)\n"
    ) in text


def test_what_no_server_runs_cannot_be_sampled_from(workspace: Path):
    use(workspace, {k: v for k, v in CONFIG.items() if k != "head_dim"} | LATENT)
    assert faults_of() == []
    Path("recipe.yaml").write_text(RECIPE)
    (found,) = faults_of("roles.rollout.engine=local")
    assert found.startswith("recipe.yaml:2: the local engine does not serve DeepseekV3ForCausalLM")
    assert "Fix: sample from one of LlamaForCausalLM, " in found


def served_faults_of(*overrides: str) -> list[str]:
    """Faults under SGLang, but for its absence here."""
    found = faults_of("roles.rollout.engine=sglang", *overrides)
    return [fault for fault in found if "make sglang" not in fault]


def test_experts_are_sampled_from_and_spread(workspace: Path):
    use(workspace, MOE)
    Path("recipe.yaml").write_text(RECIPE)
    assert faults_of() == []
    assert served_faults_of("roles.rollout.parallel={tp: 2, ep: 2}") == []
    found = served_faults_of("roles.rollout.parallel={tp: 5, ep: 5}")
    assert any("ep=5 does not divide the number of experts=6" in fault for fault in found)
    use(workspace, {**MOE, "moe_intermediate_size": 21})
    Path("recipe.yaml").write_text(RECIPE)
    (found,) = served_faults_of("roles.rollout.parallel.tp=2")
    assert "tp / ep=2 does not divide their width=21" in found


def test_a_server_gives_experts_to_every_layer(workspace: Path):
    use(workspace, {**MOE, "mlp_only_layers": [1]})
    Path("recipe.yaml").write_text(RECIPE)
    for found in (faults_of(), served_faults_of()):
        assert len(found) == 1
        assert "SGLang gives every layer of Qwen3MoeForCausalLM experts" in found[0]


def test_sglang_has_no_tied_experts(workspace: Path):
    use(workspace, {**MOE, "tie_word_embeddings": True})
    Path("recipe.yaml").write_text(RECIPE)
    assert faults_of() == []
    (found,) = served_faults_of()
    assert "SGLang never ties Qwen3MoeForCausalLM's output layer" in found
    assert "sample with the local engine" in found


def test_servers_run_what_weight_sync_knows():
    from hybridflow.weight_sync import layout

    assert set(SERVED) <= set(layout.FAMILIES)
    assert set(LOCAL) <= set(layout.FAMILIES)
