"""Rewards of single tokens: where a graph takes them, and what is said where it cannot."""

import json
from pathlib import Path

import pytest

from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.checks import check_file
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe
from tests.recipe.conftest import CONFIG
from tests.recipe.test_critic_checks import COST, PPO

MINE = "def score(prompt, response, answer, row):\n    return [0.0] * len(response)\n"
OWN = "{_target_: mine.py:score, level: token}"
TOKENS = f"roles.reward={OWN}"


@pytest.fixture(autouse=True)
def _mine(workspace: Path) -> None:
    (workspace / "mine.py").write_text(MINE)


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", overrides)[1]]


def changed(name: str, *pairs: tuple[str, str]) -> str:
    """A shipped graph with other texts in it, as a file."""
    text = (SHIPPED / f"{name}.yaml").read_text()
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new, 1)
    Path("flow.yaml").write_text(text)
    return "dataflow=flow.yaml"


@pytest.mark.parametrize(
    ("overrides", "node", "scores"),
    [
        (PPO, "by_token", False),
        ([*PPO, TOKENS], "by_token", True),
        ([*COST, TOKENS], "cost_by_token", False),
        ([*COST, f"roles.cost={OWN}"], "cost_by_token", True),
        ([*COST, f"roles.cost={OWN}"], "by_token", False),
    ],
)
def test_the_shipped_graphs_take_what_the_role_gives(overrides, node: str, scores: bool):
    assert faults_of(*overrides) == []
    graph = compile_recipe(load_recipe("recipe.yaml", overrides)).stages[-1].graph
    assert ("token_scores" in graph.node(node).inputs) == scores
    given = {field for one in graph.nodes for field in one.outputs.values()}
    assert graph.node(node).inputs.items() >= {"responses": "responses"}.items()
    assert all(f in given | {*graph.inputs} for n in graph.nodes for f in n.inputs.values())


@pytest.mark.parametrize("flow", ["grpo", "reinforce_pp", "remax", "dapo", "prime"])
def test_a_graph_of_sums_refuses_them(flow: str):
    prm = "roles.prm={head: vocabulary, optimizer: {lr: 1e-3}, colocate: actor}"
    told = ["algorithm.kl.coef=0", f"dataflow={flow}", *([prm] if flow == "prime" else [])]
    before = faults_of(*told)
    (found,) = (text for text in faults_of(*told, TOKENS) if text not in before)
    assert "roles.reward.level: token does nothing" in found and "ppo or safe_rlhf" in found


def test_tokens_have_no_group_mean():
    (found,) = faults_of(*PPO, TOKENS, "roles.reward.on_error=group_mean")
    assert "group_mean is of whole responses" in found and "{value: 0.0}" in found


def test_a_role_of_whole_responses_gives_no_token_rewards():
    straight = changed(
        "ppo", ("in: [token_rewards, values]", "in: [{token_rewards: token_scores}, values]")
    )
    (found,) = faults_of(*PPO[1:], straight)
    assert "node 'advantage' needs the token rewards 'token_scores'" in found
    assert "set roles.reward.level to token" in found
    assert faults_of(*PPO[1:], straight, TOKENS) == []


STYLE = (
    "  score: ",
    "  style: {role: style, call: score, in: [prompts, answers, responses], "
    "out: [{token_rewards: style_scores}]}\n  score: ",
)
OPTION = ("out: [token_rewards]}", "out: [token_rewards], add_rewards: true}")
OTHER = ("in: [rewards, token_scores,", "in: [rewards, {token_scores: style_scores},")


@pytest.mark.parametrize(
    ("pairs", "told", "message"),
    [
        ((STYLE, OTHER, OPTION), [f"roles.style={OWN}"], None),
        ((STYLE, OTHER), [f"roles.style={OWN}"], "add `add_rewards: true`"),
        ((OPTION,), [TOKENS], "would count 'rewards' twice"),
        ((OPTION,), [], "add_rewards, but only `rewards`"),
        ((("in: [rewards, token_scores,", "in: ["),), [], "neither `rewards` nor `token_scores`"),
    ],
)
def test_outcome_and_scores_of_tokens_in_one_node(pairs, told, message: str | None):
    found = faults_of(*PPO[1:], changed("ppo", *pairs), *told)
    assert found == [] if message is None else any(message in text for text in found), found


def test_a_reward_model_scores_whole_responses(workspace: Path):
    judge = workspace / "judge"
    judge.mkdir()
    config = {**CONFIG, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (judge / "config.json").write_text(json.dumps(config))
    told = [*PPO[1:], "roles.reward={head: value, model: judge}", "cluster.devices_per_node=20"]
    assert faults_of("dataflow=ppo", *told) == []
    straight = changed(
        "ppo", ("[token_rewards, values]", "[{token_rewards: token_scores}, values]")
    )
    (found,) = faults_of(straight, *told)
    assert "needs the token rewards 'token_scores'" in found and "Fix: take `rewards`" in found
