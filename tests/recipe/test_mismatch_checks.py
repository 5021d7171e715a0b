"""What compares policies, refused where it would compare a policy with itself, or nothing."""

from pathlib import Path

import pytest

from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.checks import check_file


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", overrides)[1]]


def correction(told: str) -> str:
    return f"algorithm.rollout_correction={{{told}}}"


BOUNDS = [
    ("method: masked, high: 0.5", "high=0.5 weighs down tokens on which the engines agree"),
    ("method: truncated, high: 0.01", "Fix: set it to 1 or more, such as 2"),
    ("method: rejection, high: 4.0, low: 1.5", "low=1.5 leaves out tokens on which the engines"),
    ("method: masked, high: 1.0", "no ratio but 1 lies within algorithm.rollout_correction"),
]


@pytest.mark.parametrize(("told", "what"), BOUNDS)
def test_bounds_hold_a_ratio_of_1(workspace: Path, told: str, what: str) -> None:
    (found,) = faults_of(correction(told))
    assert what in found
    for sound in ("method: truncated, high: 1", "method: masked, high: 1, low: 0.5"):
        assert faults_of(correction(sound.replace("1,", "1.0,") + ".0" * sound.endswith("1"))) == []


CRITIC = "roles.critic={optimizer: {lr: 1e-4}, colocate: actor}"
BOUND = "algorithm.agreement.bound=1e-4"
OLD = " old:       {role: actor, call: logprobs, in: [prompts, responses], out: [{logprobs: "
REF = "{role: reference, call: logprobs, in: [prompts, responses], out: [{logprobs: ref_logprobs}]"
AGAIN = """    loss: ppo_clip
  again: {role: actor, call: update, in: [prompts, responses%s, ref_logprobs, advantages], loss: %s}
"""
TAUGHT = AGAIN.replace(", advantages", "") % ("", "cross_entropy")
LATER = [
    ("old_logprobs, ref_logprobs, advantages]", "{old_logprobs: rollout_logprobs}, advantages]"),
    ("    loss: ppo_clip\n", "    loss: ppo_clip\n    delay: {prompts: 1, responses: 1, "
     "rollout_logprobs: 1, token_versions: 1, advantages: 1}\n"),
]  # fmt: skip
NONE = ["roles.reference=null"]
GRAPHS = [
    ("grpo", [("responses, rollout_logprobs,", "responses,")], [BOUND], "agreement.bound needs"),
    ("grpo", [(" ref_logprobs, advantages", " {ref_logprobs: rollout_logprobs}, advantages")], [],
     "which node 'generate' gives: the policy that sampled"),
    ("grpo", [(REF, REF.replace("reference", "actor"))], NONE, "with itself"),
    ("dpo", [("role: reference", "role: actor")], [*NONE, "evaluation=null"], "with itself"),
    ("grpo", [("    loss: ppo_clip\n", AGAIN % ("", "ppo_clip"))], [], "moved policy for the old"),
    ("grpo", [("    loss: ppo_clip\n", AGAIN % (", rollout_logprobs", "reinforce"))], [BOUND],
     "would blame the servers"),
    ("grpo", [("    loss: ppo_clip\n", TAUGHT)], [], None),
    ("grpo", [("    loss: ppo_clip\n", TAUGHT)], [BOUND], None),
    ("grpo", LATER, [BOUND, *NONE, "algorithm.kl={}", "roles.rollout.max_staleness=1"],
     "bound would compare no token"),
    ("safe_rlhf", [("returns], whiten: false}", "returns]}")], ["algorithm.lagrangian={limit: 0}"],
     "'reward_advantage' whitens what node 'advantage' weighs as `advantages`"),
]  # fmt: skip
FURTHER = {
    "dpo": ["data.samples_per_prompt=1", "roles.reward=null", "algorithm.kl={}"],
    "safe_rlhf": [
        CRITIC,
        "roles.cost={function: exact_match}",
        "roles.cost_critic={head: value, optimizer: {lr: 1e-4}, colocate: actor}",
    ],
}


@pytest.mark.parametrize(("flow", "changes", "told", "what"), GRAPHS)
def test_graphs(
    workspace: Path, flow: str, changes: list[tuple[str, str]], told: list[str], what: str | None
) -> None:
    graph = (SHIPPED / f"{flow}.yaml").read_text()
    for old, new in changes:
        assert old in graph
        graph = graph.replace(old, new)
    Path("flow.yaml").write_text(graph)
    rows = '{"prompt": "1", "answer": "1", "chosen": "1", "rejected": "2"}\n'
    Path("train.jsonl").write_text(rows * 9)
    Path("eval.jsonl").write_text(rows * 9)
    found = faults_of("dataflow=flow.yaml", *FURTHER.get(flow, []), *told)
    if what is None:
        assert found == []
    else:
        assert len(found) == 1 and what in found[0] and found[0].startswith("flow.yaml:"), found


def test_a_second_update_on_samples_of_its_own_is_sound(workspace: Path) -> None:
    graph = (SHIPPED / "gpg.yaml").read_text().replace("loss: gpg", "loss: ppo_clip")
    second = """
  more:  {role: rollout, call: generate, in: [prompts], out: [{responses: more}], after: [publish]}
  judge: {role: reward, call: score, in: [prompts, answers, {responses: more}], out: [{rewards: s}]}
  told:  {function: rloo, in: [{rewards: s}], out: [{advantages: told}]}
  again: {role: actor, call: update, in: [prompts, {responses: more}, {advantages: told}], loss: %s}
  last:  {role: actor, call: publish, to: rollout, after: [again]}
  save: """
    graph = graph.replace("\n  save:  ", second % "ppo_clip")
    graph = graph.replace("after: [publish], every: checkpoint", "after: [last], every: checkpoint")
    Path("flow.yaml").write_text(graph)
    told = ["dataflow=flow.yaml", "algorithm.kl={}"]
    assert faults_of(*told) == []


@pytest.mark.parametrize(
    ("flow", "old", "new", "what"),
    [
        ("dpo", "ref_logprobs], l", "ref_logprobs, {advantages: ref_logprobs}], l", "advantages"),
        ("orpo", "pairs}], loss: orpo", "pairs}, {labels: x}], loss: orpo", "labels"),
    ],
)
def test_inputs_that_a_loss_does_not_read(
    workspace: Path, flow: str, old: str, new: str, what: str
) -> None:
    graph = (SHIPPED / f"{flow}.yaml").read_text()
    assert old in graph
    Path("flow.yaml").write_text(graph.replace(old, new))
    found = faults_of("dataflow=flow.yaml", *FURTHER["dpo"])
    assert any(f"takes `{what}`, which the loss '{flow}' does not read" in f for f in found), found


def test_old_logprobs_of_a_second_update_are_of_before_the_first(workspace: Path) -> None:
    graph = (SHIPPED / "grpo.yaml").read_text()
    late = "role: actor, call: logprobs, in: [prompts, responses], out: [{logprobs: late}]"
    fields = "prompts, responses, {old_logprobs: late}, ref_logprobs, advantages"
    again = f"  again: {{role: actor, call: update, in: [{fields}], loss: ppo_clip}}\n"
    graph = graph.replace("  publish:", f"{again}  publish:", 1)
    graph = graph.replace("after: [update], out:", "after: [again], out:", 1)
    Path("flow.yaml").write_text(graph.replace("  advantage:", f"  late: {{{late}}}\n  advantage:"))
    assert faults_of("dataflow=flow.yaml") == []
    Path("flow.yaml").write_text(graph.replace("  again:", f"  late: {{{late}}}\n  again:"))
    (found,) = faults_of("dataflow=flow.yaml")
    assert "its old_logprobs come from 'late', which follows it" in found


def test_what_mends_a_correction_without_old_logprobs(workspace: Path) -> None:
    """The fix that is told leads to no further fault."""
    graph = (SHIPPED / "gpg.yaml").read_text()
    Path("flow.yaml").write_text(graph)
    told = ["dataflow=flow.yaml", correction("method: truncated, high: 2.0")]
    (found,) = faults_of(*told)
    node = found[found.index("`old: ") + 1 : found.index("` before it")]
    graph = graph.replace("  advantage:", f"  {node}\n  advantage:")
    Path("flow.yaml").write_text(
        graph.replace("token_versions, ref", "token_versions, old_logprobs, ref")
    )
    assert faults_of(*told) == []


def test_k1_is_no_penalty_in_the_loss(workspace: Path) -> None:
    (found,) = faults_of("algorithm.kl={coef: 0.1, estimator: k1}")
    assert "k1 penalises nothing in the loss" in found
    for estimator in ("k2", "k3", "abs"):
        assert faults_of(f"algorithm.kl={{coef: 0.1, estimator: {estimator}}}") == []
    told = ["dataflow=ppo", CRITIC, "algorithm.kl={coef: 0.1, estimator: k1, place: reward}"]
    assert faults_of(*told) == []


def test_a_model_with_the_wrong_head_is_one_fault_with_its_fix(workspace: Path) -> None:
    told = ["dataflow=safe_rlhf", "algorithm.lagrangian={limit: 0}", *FURTHER["safe_rlhf"]]
    assert faults_of(*told) == []
    found = faults_of(*told, "roles.cost_critic.head=vocabulary")
    assert found and all("has no call 'values'" in fault for fault in found), found
    assert len(found) == 1 and "Fix: set roles.cost_critic.head to value" in found[0]


def test_names_are_near_whatever_their_case(workspace: Path) -> None:
    assert "did you mean 'ppo'?" in faults_of("dataflow=PPO")[0]
