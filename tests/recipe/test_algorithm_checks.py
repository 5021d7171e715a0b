"""Faults of the algorithm section against the graph, and the shipped dataflows beside GRPO's."""

import difflib
import re
from pathlib import Path

import pytest

from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.checks import check_file
from hybridflow.recipe.compile import compile_recipe

ROOT = Path(__file__).parents[2]
GRPO = (ROOT / "recipes/dataflows/grpo.yaml").read_text()
FORMAT = "roles.format={function: length, parameters: {budget: 3}}"


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", overrides)[1]]


GROUPS = ("rloo", "opo", "gpg", "gdpo", "reinforce_pp_baseline")
NO_REFERENCE = ["algorithm.kl.coef=0.0", "roles.reference=null"]
FLOWS = (
    *GROUPS,
    "dapo",
    "grpo_full_kl",
    "prime",
    "remax",
    "reinforce_pp",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
)


@pytest.mark.parametrize("name", FLOWS)
def test_shipped_dataflows_are_sound(workspace: Path, name: str):
    further = {
        "gdpo": [FORMAT],
        "dapo": NO_REFERENCE,
        "grpo_full_kl": ["algorithm.kl.estimator=full"],
        "prime": ["roles.prm={head: vocabulary, optimizer: {lr: 1e-6}, colocate: actor}"],
    }
    assert faults_of(f"dataflow={name}", *further.get(name, [])) == []


@pytest.mark.parametrize("name", ["reinforce_pp", "remax"])
def test_one_sample_is_enough_for_some(workspace: Path, name: str):
    assert faults_of(f"dataflow={name}", "data.samples_per_prompt=1") == []


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_one_is_a_fault(workspace: Path, name: str):
    further = [FORMAT] if name == "gdpo" else []
    found = faults_of(f"dataflow={name}", "data.samples_per_prompt=1", *further)
    assert len(found) == 1 and "compares samples of a prompt" in found[0]
    assert "set data.samples_per_prompt to 2 or more" in found[0]


ADAPTIVE = "algorithm.kl={coef: 0.1, adaptive: {target: 0.01, horizon: 1000}}"
SETTINGS = [
    (["algorithm.kl={adaptive: {target: 0.1, horizon: 100}}"], "kl.coef, which is 0", "set coef"),
    (["algorithm.kl.adaptive={target: 0.1}"], "adaptive.horizon` is missing", "add `horizon"),
    (
        [ADAPTIVE, "algorithm.kl.adaptive.horizon=3.0", "roles.reference={colocate: actor}"],
        "horizon=3 is less than a step's samples",
        "at least 12",
    ),
    (["algorithm.dual_clip=3.0"], "command line: algorithm.dual_clip does nothing", "dual_clip"),
    (["algorithm.sapo={tau_positive: 2.0}"], "algorithm.sapo does nothing", "reads it: sapo"),
    (["dataflow=sapo", "algorithm.clip=0.1"], "algorithm.clip does nothing", "ppo_clip, dual_clip"),
    (["dataflow=rloo", "algorithm.normalize_by_std=false"], "has no group_relative", "remove it"),
    (["algorithm.loss_divisor=4.0"], "does nothing under aggregation=token_mean", "to constant"),
    (["algorithm.aggregation=constant"], "lacks algorithm.loss_divisor", "loss_divisor: 4"),
    (
        ["algorithm.clip=[20, 0.3]"],
        "clip=20 bounds the ratio of ppo_clip below 1 - 20",
        "`clip: 0.2`",
    ),
    (["algorithm.dual_clip=1.0"], "`algorithm.dual_clip` must be greater than 1", ""),
    (["algorithm.sapo={tau: 1.0}"], "unknown key 'tau'", "valid: tau_negative"),
    (["algorithm.loss_divisor=0.0"], "must be greater than 0", ""),
    (
        ["algorithm.rollout_correction={method: truncated, high: 2.0, low: 0.5}"],
        "command line: algorithm.rollout_correction.low does nothing",
        "use `masked` or `rejection`",
    ),
    (
        ["algorithm.rollout_correction={method: masked, high: 2.0, low: 3.0}"],
        "has low 3 and high 2",
        "let low be below high",
    ),
    (
        ["algorithm.rollout_correction={method: truncated}"],
        "rollout_correction.high` is missing",
        "2.0",
    ),
]


@pytest.mark.parametrize(("overrides", "what", "fix"), SETTINGS)
def test_settings_of_losses(workspace: Path, overrides: list[str], what: str, fix: str):
    found = faults_of(*overrides)
    assert len(found) == 1 and what in found[0] and fix in found[0], found


CORRECTION = "algorithm.rollout_correction={method: masked, high: 5.0}"
CORRECTED = [
    ("old_logprobs, ref", "ref", CORRECTION, "lacks `old_logprobs`, which algorithm.rollout_corr"),
    (
        "rollout_logprobs, token_versions, old_logprobs",
        "token_versions, old_logprobs",
        "algorithm.off_policy_mask={bound: 0.1}",
        "lacks `rollout_logprobs`, which algorithm.off_policy_mask needs",
    ),
    (
        "old_logprobs, ref",
        "{old_logprobs: rollout_logprobs}, ref",
        CORRECTION,
        "takes 'rollout_logprobs' as rollout_logprobs and as old_logprobs",
    ),
]


@pytest.mark.parametrize(("old", "new", "setting", "what"), CORRECTED)
def test_fields_of_corrections(workspace: Path, old: str, new: str, setting: str, what: str):
    assert GRPO.count(old) == 1
    Path("flow.yaml").write_text(GRPO.replace(old, new))
    found = faults_of("dataflow=flow.yaml", setting)
    assert len(found) == 1 and what in found[0], found


def test_what_the_whole_kl_needs(workspace: Path):
    (found,) = faults_of("algorithm.kl.estimator=full")
    assert "lacks `ref_hidden`, which algorithm.kl.coef > 0 needs with the estimator" in found
    found = faults_of("dataflow=grpo_full_kl")
    assert len(found) == 2 and "only the estimator full reads" in found[1]
    graph = (SHIPPED / "grpo_full_kl.yaml").read_text()
    assert graph.count("role: reference") == 1
    Path("flow.yaml").write_text(graph.replace("role: reference", "role: actor"))
    told = ["algorithm.kl.estimator=full", "roles.reference=null"]
    (found,) = faults_of("dataflow=flow.yaml", *told)
    assert "gives 'ref_hidden' of the role 'actor'" in found
    told = ["dataflow=grpo_full_kl", "algorithm.kl.estimator=full"]
    folder = compile_recipe(check_file("recipe.yaml", [])[0]).recipe.model.path
    (found,) = faults_of(*told, f"roles.reference.model={folder}")
    assert "the output head of the policy's own start" in found
    prm = "roles.prm={head: vocabulary, optimizer: {lr: 1e-4}, colocate: actor}"
    (found,) = faults_of("dataflow=prime", prm, "algorithm.kl={coef: 0, estimator: full}")
    assert "node 'update' measures the KL by `ref_logprobs`" in found


def test_prime_reads_both_kinds_of_settings(workspace: Path):
    """Those of losses of tokens and those of losses of whole responses."""
    role = "roles.prm={head: vocabulary, optimizer: {lr: 1e-6}, colocate: actor}"
    settings = ["algorithm.preference.beta=0.05", "algorithm.aggregation=sequence_mean_token_mean"]
    assert faults_of("dataflow=prime", role, *settings) == []
    found = faults_of("dataflow=prime")
    assert len(found) == 2 and all("role 'prm', which the recipe lacks" in fault for fault in found)


LOOPS = [
    ("finished, rewards]", "rewards]", "puts out `kept_finished` without taking `finished`"),
    ("out: [shaped]", "out: [shaped], buffer: 5", "5 tokens, does not lie within roles.rollout"),
    ("out: [shaped]", "out: [shaped], buffer: 0", "must be 1 or more, not 0"),
]


@pytest.mark.parametrize(("old", "new", "what"), LOOPS)
def test_what_a_loop_keeps(workspace: Path, old: str, new: str, what: str):
    graph = (SHIPPED / "dapo.yaml").read_text()
    assert graph.count(old) == 1
    Path("flow.yaml").write_text(graph.replace(old, new))
    found = faults_of("dataflow=flow.yaml", *NO_REFERENCE)
    assert len(found) == 1 and what in found[0], found


def test_a_correction_brings_the_old_logprobs(workspace: Path):
    recipe, faults = check_file("recipe.yaml", [CORRECTION])
    assert faults == [] and recipe is not None
    (stage,) = compile_recipe(recipe).stages
    assert "old" in stage.graph.names and not stage.off_policy


def test_settings_that_are_read_are_no_fault(workspace: Path):
    Path("flow.yaml").write_text(GRPO.replace("loss: ppo_clip", "loss: dual_clip"))
    assert faults_of("dataflow=flow.yaml", "algorithm.dual_clip=3.0", "algorithm.clip=0.1") == []
    assert faults_of("dataflow=sapo", "algorithm.sapo={tau_positive: 2.0}") == []
    assert faults_of("dataflow=sapo", "algorithm.clip=null") == [], "defaults, as run folders have"
    assert faults_of("algorithm.aggregation=constant", "algorithm.loss_divisor=4.0") == []
    assert faults_of("dataflow=gmpo", "algorithm.clip=1.5") == [], "of logarithms"


ADVANTAGE = "{function: group_relative, in: [rewards], out: [advantages]}"
GRAPHS = [
    (
        [
            (ADVANTAGE, "{function: reinforce_pp, in: [rewards, responses], out: [advantages]}"),
            ("loss: ppo_clip", "loss: gspo"),
        ],
        "takes one advantage per response, but 'advantages' has one per token",
    ),
    (
        [
            (
                ADVANTAGE,
                "{function: gdpo, in: [{first: rewards}, {second: rewards}], out: [advantages], "
                "weights: [1.0]}",
            )
        ],
        "has 1 weights for 2 rewards",
    ),
    (
        [
            (
                "  old:  ",
                "  greedy: {role: rollout, call: generate, in: [prompts], "
                "out: [{responses: best}], sampling: greedy}\n"
                "  best: {role: reward, call: score, in: [prompts, answers, {responses: best}], "
                "out: [{rewards: top}]}\n  old:  ",
            ),
            (
                ADVANTAGE,
                "{function: gdpo, in: [{first: rewards}, {second: top}], out: [advantages]}",
            ),
        ],
        "node 'advantage' mixes fields of different responses: rewards (sampled by 'generate'), ",
    ),
    (
        [("loss: ppo_clip", "loss: reinforce"), (" ref_logprobs, advantages", " advantages")],
        "lacks `ref_logprobs`, which algorithm.kl.coef > 0 needs",
    ),
]


@pytest.mark.parametrize(("changes", "what"), GRAPHS)
def test_graphs(workspace: Path, changes: list[tuple[str, str]], what: str):
    text = GRPO
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    Path("flow.yaml").write_text(text)
    found = faults_of("dataflow=flow.yaml")
    assert len(found) == 1 and what in found[0], found


def test_reinforce_needs_no_old_logprobs(workspace: Path):
    assert faults_of("dataflow=gpg", "roles.actor.mini_batches=2") == []


def differing_lines(name: str, base: str = "grpo") -> set[str]:
    """Lines of a shipped dataflow that another lacks, and the reverse, comments aside."""
    before, after = ((SHIPPED / f"{n}.yaml").read_text() for n in (base, name))
    return {
        f"{line[0]} {' '.join(line[1:].split())}"
        for line in difflib.ndiff(before.splitlines(), after.splitlines())
        if line[0] in "+-" and not line[1:].lstrip().startswith("#")
    }


def lines_of(block: str) -> set[str]:
    return {f"{row[0]} {' '.join(row[1:].split())}" for row in block.splitlines()}


BESIDE = [
    ("PPO's graph beside GRPO's", "ppo", "grpo"),
    ("Its graph beside PPO's", "safe_rlhf", "ppo"),
    ("ReMax's graph beside \\[PPO's\\]", "remax", "ppo"),
]


@pytest.mark.parametrize(("lead", "name", "base"), BESIDE)
def test_the_guide_shows_graphs_beside_each_other(lead: str, name: str, base: str):
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    (block,) = re.findall(lead + r"[^\n]*\n\n```diff\n(.*?)```", page, re.DOTALL)
    assert lines_of(block) == differing_lines(name, base)


def test_the_guide_shows_the_differences():
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    shown: dict[str, set[str]] = {}
    for name, block in re.findall(r"### `(\w+)`\n.*?```diff\n(.*?)```", page, re.DOTALL):
        shown[name] = lines_of(block)
    assert set(shown) == set(FLOWS)
    for name, lines in shown.items():
        assert lines == differing_lines(name), name


def test_an_old_policy_of_another_role(workspace: Path):
    """The ratio compares the actor with itself before the update, not with the reference."""
    told = "{role: reference, call: logprobs, in: [prompts, responses], out: [{logprobs: old}]}"
    flow = (
        "{inputs: [prompts, answers], nodes: {"
        "g: {role: rollout, call: generate, in: [prompts], out: [responses]},"
        "s: {role: reward, call: score, in: [prompts, answers, responses], out: [rewards]},"
        f"o: {told}, a: {{function: rloo, in: [rewards], out: [advantages]}},"
        "u: {role: actor, call: update, loss: ppo_clip,"
        " in: [prompts, responses, advantages, {old_logprobs: old}]},"
        "p: {role: actor, call: publish, to: rollout, after: [u]}}}"
    )
    off = ("algorithm.kl={}", "evaluation=null", "checkpoint={}")
    found = faults_of(f"dataflow={flow}", *off)
    assert len(found) == 1 and "compares with 'old' of the role 'reference'" in found[0], found
    mended = f"dataflow={flow.replace('role: reference', 'role: actor')}"
    assert faults_of(mended, *off, "roles.reference=null") == []


def test_an_output_may_have_the_name_of_a_column(workspace: Path):
    """Only what the graph lists among its inputs comes from the data."""
    Path("flow.yaml").write_text(
        """inputs: [prompts, answers]
nodes:
  generate: {role: rollout, call: generate, in: [prompts], out: [responses]}
  score: {role: reward, call: score, in: [prompts, answers, responses], out: [rewards]}
  good: {function: outcome_labels, in: [rewards], out: [labels]}
  update: {role: actor, call: update, in: [prompts, responses, {sample_mask: labels}], loss: sft}
  publish: {role: actor, call: publish, to: rollout, after: [update]}
"""
    )
    told = ["dataflow=flow.yaml", "algorithm={}", "roles.reference=null", "checkpoint={}"]
    assert faults_of(*told, "evaluation=null") == []
