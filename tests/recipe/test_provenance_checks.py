"""Fields of the right type from the wrong node, and graphs that would teach nothing."""

from pathlib import Path

import pytest

from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.checks import check_file

CRITIC = "roles.critic={optimizer: {lr: 1e-3}, colocate: actor}"
IN_REWARD = "algorithm.kl={coef: 0.01, place: reward, estimator: k1}"
PPO = [CRITIC]
COST = [
    CRITIC,
    "roles.cost={function: exact_match}",
    "roles.cost_critic={head: value, optimizer: {lr: 1e-3}, colocate: critic}",
    "algorithm.lagrangian={limit: 0.2}",
    IN_REWARD,
]

KTO = ["roles.reward=null", "algorithm.kl={}", "data.label_column=good", "evaluation=null"]
TAUGHT = ["roles.reference=null", "roles.reward=null", "algorithm.kl={}"]
TAUGHT += ["roles.teacher={head: vocabulary, model: elsewhere, colocate: actor}"]
AGAIN = """  again: {role: rollout, call: generate, in: [prompts], out: [{responses: tail}]}
  both: {role: reward, call: score, in: [prompts, answers, {responses: tail}], out: [{rewards: b}]}
  sum: {function: opo, in: [{rewards: rewards}, {responses: tail}], out: [{advantages: three}]}
"""


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", overrides)[1]]


GRAPHS = [
    ("safe_rlhf", "responses, values, returns]", "responses, {values: cost_values}, returns]", COST,
     "takes 'cost_values' of the role 'cost_critic' as its values"),
    ("safe_rlhf", "responses, values, returns]", "responses, values, {returns: cost_returns}]",
     COST, "'cost_returns' are over the values of the role 'cost_critic'"),
    ("safe_rlhf", "in: [token_rewards, values]", "in: [token_rewards, {values: cost_values}]", COST,
     "'returns' are over the values of the role 'cost_critic'"),
    ("safe_rlhf", "cost_advantages, costs]", "{cost_advantages: reward_advantages}, costs]", COST,
     "weighs 'reward_advantages' against itself"),
    ("safe_rlhf", "cost_advantages, costs]", "cost_advantages, {costs: rewards}]", COST,
     "weighs what node 'cost' scores, but 'rewards', by which lambda moves, are of node 'score'"),
    ("safe_rlhf", "kl_share: -0.5", "kl_share: 0.5", COST, "takes the KL off a cost"),
    ("grpo", "out: [responses, rollout_logprobs, token_versions]}",
     "out: [responses, rollout_logprobs, token_versions], sampling: greedy}", [],
     "the greedy node 'generate' gives one of each"),
    ("grpo", "  old:  ", f"{AGAIN}  old:  ", [],
     "rewards (sampled by 'generate'), tail (sampled by 'again')"),
    ("kto", "{ref_logprobs: rotated_ref_logprobs}, {response_mask: rotated_mask}]",
     "{ref_logprobs: ref_logprobs}, {response_mask: rotated_mask}]", KTO,
     "rotated_logprobs (made by 'rotate'), ref_logprobs (the data's)"),
    ("kto", "[{logprobs: rotated_logprobs}, {ref_logprobs: rotated_ref_logprobs}, {response_mask: "
     "rotated_mask}]", "[{logprobs: own_logprobs}, ref_logprobs]", KTO,
     "'level' takes `ref_logprobs` of answers to their own prompts"),
    ("distill", "[{logprobs: old_logprobs}, teacher_logprobs]",
     "[{logprobs: teacher_logprobs}, {teacher_logprobs: old_logprobs}]", TAUGHT,
     "would train the role 'actor' away from 'teacher'"),
    ("grpo", "out: [weight_version]}", "out: [weight_version], every: 2}", [],
     "does not publish in every step that trains the actor"),
    ("ppo", "{function: gae, in: [token_rewards, values]", "{function: gae, in: [token_rewards, "
     "{values: rollout_logprobs}]", PPO,
     "is tokens of float (log-probabilities), but 'values' of gae takes tokens of float (values)"),
    ("ppo", "responses, values, returns]", "responses, values, {returns: advantages}]", PPO,
     "but 'returns' of critic.update takes tokens of float (returns)"),
    ("grpo", "[prompts, responses, rollout_logprobs, token_versions, old_logprobs",
     "[prompts, {responses: token_versions}, rollout_logprobs, old_logprobs", [],
     "'token_versions' is tokens of int (weight versions), but 'responses'"),
    ("grpo", "    loss: ppo_clip\n",
     "    loss: ppo_clip\n    delay: {token_versions: 1, responses: 1, rollout_logprobs: 1, "
     "old_logprobs: 1, ref_logprobs: 1, advantages: 1, prompts: 1}\n", [],
     "trains on samples of 1 steps before, but roles.rollout.max_staleness allows 0"),
    ("ppo", "  update_critic: {role: critic, call: update, in: [prompts, responses, values, "
     "returns], loss: value_clip}\n", "", [CRITIC, "checkpoint.every=null"],
     "reads the values of the role 'critic', which no node trains"),
    ("dapo", "    repeat_until: {condition: enough, from: generate, cap: 16}\n", "",
     ["roles.reference=null", "algorithm.kl={}"], "node 'keep' does not repeat"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "there", "instead", "told", "what"), GRAPHS)
def test_a_shipped_graph_with_one_change(
    workspace: Path, name: str, there: str, instead: str, told: list[str], what: str
) -> None:
    text = SHIPPED.joinpath(f"{name}.yaml").read_text()
    assert text.count(there) == 1
    Path("graph.yaml").write_text(text)
    assert not [fault for fault in faults_of("dataflow=graph.yaml", *told) if what in fault]
    Path("graph.yaml").write_text(text.replace(there, instead))
    assert any(what in fault for fault in faults_of("dataflow=graph.yaml", *told))


def test_a_publish_before_its_update(workspace: Path) -> None:
    lines = SHIPPED.joinpath("grpo.yaml").read_text().splitlines()
    (publish,) = (line for line in lines if line.startswith("  publish:"))
    lines.remove(publish)
    lines.insert(lines.index("  update:"), publish.replace("[update]", "[advantage]"))
    Path("graph.yaml").write_text("\n".join(lines))
    assert any("does not wait for 'update'" in fault for fault in faults_of("dataflow=graph.yaml"))


SETTINGS = [
    ("kto", ["algorithm.preference={desirable_weight: 0, undesirable_weight: 0}"],
     "both weights at 0"),
    ("kto", ["data.prompts_per_step=1", "roles.actor.parallel={}"],
     "gives each prompt the answer of another, and data.prompts_per_step is 1"),
    ("distill", ["roles.teacher={head: vocabulary, colocate: actor}"],
     "'teacher' teaches with the weights with which the student begins"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "told", "what"), SETTINGS)
def test_a_shipped_graph_with_a_setting(
    workspace: Path, name: str, told: list[str], what: str
) -> None:
    assert any(what in fault for fault in faults_of(f"dataflow={name}", *told))
    sound = [text for text in told if "preference" not in text and "teacher" not in text]
    sound = [text.replace("step=1", "step=2") for text in sound]
    assert not any(what in fault for fault in faults_of(f"dataflow={name}", *sound))
