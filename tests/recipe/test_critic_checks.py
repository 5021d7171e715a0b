"""Faults of critics and further models, said before anything starts."""

import json
from pathlib import Path

import pytest

from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.checks import check, check_file
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe
from tests.recipe.conftest import CONFIG

CRITIC = "roles.critic={optimizer: {lr: 1e-3}, colocate: actor}"
PPO = ["dataflow=ppo", CRITIC]
COST = [
    "dataflow=safe_rlhf",
    CRITIC,
    "roles.cost={function: exact_match}",
    "roles.cost_critic={head: value, optimizer: {lr: 1e-3}, colocate: critic}",
    "algorithm.lagrangian={limit: 0.2}",
]


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", overrides)[1]]


def test_ppo_and_safe_rlhf_are_sound(workspace: Path):
    assert faults_of(*PPO) == [] and faults_of(*COST) == []
    plan = compile_recipe(load_recipe("recipe.yaml", COST))
    assert plan.pool_of("cost_critic") is plan.pool_of("actor")
    assert set(plan.stages[0].trained) == {"actor", "critic", "cost_critic"}


CASES = [
    (["dataflow=ppo"], "the role 'critic', which the recipe lacks"),
    ([*PPO, "roles.critic.parallel={dp: 3}"], "does not divide over dp=3 ranks of the critic"),
    ([*PPO, "roles.critic.mini_batches=3"], "do not divide into mini_batches=3"),
    ([*PPO, "roles.critic.parallel={tp: 3}"], "tp=3 does not divide num_key_value_heads=2"),
    ([*PPO, "roles.critic.micro_batch_tokens=5"], "cannot hold the longest sample"),
    ([*PPO, "roles.critic.colocate=acter"], "did you mean 'actor'?"),
    ([*PPO, "roles.critic.colocate=reward"], "which is no role with devices"),
    ([*PPO, "roles.critic.model=nowhere"], "nowhere holds no readable config.json"),
    (["algorithm.gae={lam: 0.9}"], "algorithm.gae does nothing"),
    (["algorithm.value_clip=0.3"], "algorithm.value_clip does nothing"),
    (["algorithm.kl.place=reward"], "the dataflow has no node of token_rewards"),
    ([*PPO, "algorithm.kl={coef: 0.1, place: reward, estimator: k1}"], None),
    (["algorithm.critic_warmup_steps=3"], "would update the actor during"),
    (["algorithm.lagrangian={limit: 1}"], "algorithm.lagrangian does nothing"),
    ([*COST[:-1]], "needs algorithm.lagrangian"),
    ([*COST, "algorithm.lagrangian.start=99.0"], "start is above maximum=10"),
    ([*COST, "roles.cost_critic.optimizer=null"], "role 'cost_critic', which is frozen"),
    ([*COST, "roles.cost_critic.head=vocabulary"], "(model) has no call 'values'"),
    ([*COST, "roles.cost_critic.head=other"], "`roles.cost_critic.head` must be"),
]


@pytest.mark.parametrize(("overrides", "message"), CASES)
def test_faults(workspace: Path, overrides: list[str], message: str | None):
    found = faults_of(*overrides)
    if message is None:
        assert found == []
    else:
        assert any(message in text for text in found), found


def test_a_circle_of_hosts(workspace: Path):
    found = faults_of(*COST, "roles.critic.colocate=cost_critic")
    assert any("critic -> cost_critic -> critic" in text for text in found)


CHANGES = [
    ("after: [publish, update_critic]", "after: [publish]", "does not wait for 'update_critic'"),
    (" responses, values, returns], loss", " responses, values], loss", "lacks `returns`"),
    ("loss: value_clip", "loss: ppo_clip", "must be one of value_clip, value_mse"),
    ("{role: actor, call: publish", "{role: critic, call: publish", "has no call 'publish'"),
    (", {logprobs: old_logprobs}, ref_logprobs]", "]", "lacks `logprobs` and `ref_logprobs`"),
]


@pytest.mark.parametrize(("old", "new", "message"), CHANGES)
def test_graphs(workspace: Path, old: str, new: str, message: str):
    graph = (SHIPPED / "ppo.yaml").read_text()
    assert old in graph
    Path("flow.yaml").write_text(graph.replace(old, new, 1))
    kl = "algorithm.kl={coef: 0.1, place: reward}"
    found = faults_of("dataflow=flow.yaml", CRITIC, kl)
    assert any(message in text for text in found), found


def test_reinforce_pp_takes_the_kl_off_the_reward(workspace: Path):
    kl = "algorithm.kl={coef: 0.1, place: reward, estimator: k1}"
    assert faults_of("dataflow=reinforce_pp", kl) == []
    graph = (SHIPPED / "reinforce_pp.yaml").read_text()
    Path("flow.yaml").write_text(graph.replace(", {logprobs: old_logprobs}, ref_logprobs]", "]"))
    (found,) = [text for text in faults_of("dataflow=flow.yaml", kl) if "lacks `logprobs`" in text]
    assert "'advantage' lacks `logprobs` and `ref_logprobs`" in found


def test_the_warm_up_is_a_stage_in_which_the_actor_does_nothing(workspace: Path):
    told = [*PPO, "algorithm.critic_warmup_steps=4", "roles.actor.epochs=2", "checkpoint=null"]
    falling = "roles.critic.optimizer={lr: 1.0, schedule: cosine}"
    plan = compile_recipe(load_recipe("recipe.yaml", [*told[:-1], falling]))
    first, second = plan.stages
    assert (first.name, first.steps, set(first.trained)) == ("critic_warmup", 4, {"critic"})
    names = {node.name for node in first.graph.nodes}
    assert not names & {"update", "publish", "old"} and "update_critic" in names
    assert second.goes_on and second.trained["critic"].goes_on
    assert not second.trained["actor"].goes_on and second.off_policy and not first.off_policy
    assert plan.scheduled_steps(first, "critic") == plan.scheduled_steps(second, "critic") == 9
    assert plan.scheduled_steps(first, "actor") == plan.scheduled_steps(second, "actor") == 10


def test_a_model_of_its_own(workspace: Path):
    folder = Path("judge")
    folder.mkdir()
    told = [*PPO, "roles.critic.model=judge", "roles.critic.parallel={tp: 2}"]
    (folder / "config.json").write_text(json.dumps(CONFIG))
    recipe = load_recipe("recipe.yaml", told)
    assert check(recipe) == [] and recipe.model_path("critic") == "judge"
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 41}))
    assert "judge has 41 token ids, model.path 40" in str(check(recipe)[0])
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_key_value_heads": 3}))
    assert "tp=2 does not divide num_key_value_heads=3" in str(check(recipe)[0])
    (folder / "config.json").write_text("{}")
    assert "no model of a known architecture" in str(check(recipe)[0])
