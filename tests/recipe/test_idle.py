"""Every key of a recipe has a reader, and one that nothing reads is a fault."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from hybridflow.recipe.catalogue import FUNCTIONS, LOSSES, VALUE_LOSSES
from hybridflow.recipe.checks import check_file
from hybridflow.recipe.checks.idle import ALWAYS, ELSEWHERE
from hybridflow.recipe.checks.readers import READERS
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.schema_rewards import FunctionSection
from hybridflow.recipe.schema_roles import FurtherModelSection
from hybridflow.recipe.section import Section

ROOT = Path(__file__).parents[2]
KINDS = {"roles.critic": "roles.MODEL", "roles.reward": "roles.REWARD"}


def sections(kind: Any) -> list[type[Section]]:
    """Sections within an annotation, those of mappings too."""
    if isinstance(kind, type):
        return [kind] if issubclass(kind, Section) else []
    return [found for inner in get_args(kind) for found in sections(inner)]


def leaves(section: type[Section], path: str = "") -> Iterator[str]:
    """Every key that holds no section, with the roles' names as the tables have them."""
    for name, info in section.model_fields.items():
        key = f"{path}.{name}".lstrip(".")
        key = KINDS.get(key, key)
        found = sections(info.annotation)
        if not found:
            yield key
        for inner in found:
            below = {FunctionSection: f"{key}.NAME", FurtherModelSection: "roles.MODEL"}
            yield from leaves(inner, below.get(inner, key))


def test_every_key_of_the_schema_has_one_reader() -> None:
    """A new key must be put into one of the tables, or nobody would say that it does nothing."""
    schema = {*leaves(Recipe)}
    tables = [
        {f"{section}.{key}".lstrip(".") for section, keys in table.items() for key in keys}
        for table in (ALWAYS, ELSEWHERE)
    ]
    read = {key for key in READERS if key in schema}
    assert schema - read - tables[0] - tables[1] == set(), "no table has them"
    assert tables[0] & tables[1] | read & tables[0] | read & tables[1] == set(), "two have them"
    whole = READERS.keys() - read  # of sections that may be left out
    assert all(any(leaf.startswith(f"{key}.") for leaf in schema) for key in whole), whole
    assert tables[0] | tables[1] <= schema


def test_what_losses_and_functions_declare_is_in_the_schema() -> None:
    entries = [*LOSSES.values(), *VALUE_LOSSES.values(), *FUNCTIONS.values()]
    declared = {f"algorithm.{key}" for entry in entries for key in entry.settings}
    assert declared <= READERS.keys()


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", overrides)[1]]


SFT = ("dataflow=sft", "data.samples_per_prompt=1", "roles.reference=null", "roles.reward=null")
CRITIC = "roles.critic={optimizer: {lr: 1e-4}, colocate: actor}"
WARM = "warm_start={steps: 1, prompts_per_step: 4, lr: 1e-3}"
PAIRS = ("data.samples_per_prompt=1", "roles.reward=null", "algorithm.kl={}")
IDLE = [
    (["data.label_column=x"], "data.label_column does nothing: it is for the inputs labels"),
    (["data.turns=last"], "reads no conversations. Fix: remove it, or set data.messages_column"),
    (["data.messages_column=m", "data.answer_column=x"], None),
    ([*SFT, "algorithm.kl={}", "data.source_column=prompt"], "takes no `answers`"),
    ([*SFT, "algorithm.kl={}", "evaluation.temperature=0.7"], "no node samples held-out prompts"),
    ([*SFT, "algorithm.kl={}", "evaluation.samples_per_prompt=4"], "no node samples held-out"),
    (["data.chat=false", "data.system=Hi"], "data.chat is false, so there is no template"),
    (["data.max_tokens=9"], "bring no responses. Fix: remove it; data.max_prompt_tokens and"),
    ([*SFT], "algorithm.kl.coef does nothing: no update of the dataflow has a loss with advant"),
    *(
        ([*SFT, "algorithm.kl={}", f"algorithm.{told}"], f"algorithm.{key} does nothing: no update")
        for key, told in {
            "entropy_coef": "entropy_coef=0.1",
            "entropy": "entropy=true",
            "off_policy_mask": "off_policy_mask={bound: 0.1}",
            "agreement.bound": "agreement.bound=0.1",
            "agreement.old_bound": "agreement.old_bound=0.1",
            "agreement.threshold": "agreement.threshold=0.1",
            "rollout_correction": "rollout_correction={method: masked, high: 2.0}",
        }.items()
    ),
    (
        ["dataflow=dpo", "algorithm.aggregation=sequence_mean_token_sum", WARM, *PAIRS],
        "algorithm.aggregation does nothing",
    ),
    (["algorithm.kl={coef: 0, estimator: k1}"], "kl.estimator does nothing: there is no KL to"),
    (["algorithm.kl={coef: 0, place: reward}"], "kl.place does nothing: algorithm.kl.coef is 0"),
    (["algorithm.gae={lam: 0.9}"], "algorithm.gae does nothing: the dataflow has no gae"),
    (["algorithm.preference.beta=0.2"], "loss of it, and the dataflow has no prime"),
    (["algorithm.preference.odds_weight=0.2"], "use a loss that reads it: orpo."),
    (["algorithm.value_aggregation=seq-mean-token-mean"], "use a loss that reads it: value_clip"),
    (["dataflow=ppo", CRITIC, "algorithm.value_aggregation=sequence_mean_token_sum"], None),
    (["checkpoint={keep: 3}"], "checkpoint.every is null, so there are no checkpoints"),
    (["roles.rollout.python=x"], "python does nothing: the local engine runs in the driver's"),
    (["roles.second={function: exact_match}"], "roles.second does nothing: no node of the dataf"),
    ([CRITIC], "roles.critic does nothing: no node of the dataflow acts on the role"),
    (["roles.other={head: value, optimizer: {lr: 1.0}}", "roles.other=null"], None),
    (
        [f"warm_start={{steps: 2, prompts_per_step: 2, lr: 1, min_lr: {lr}}}" for lr in (1, 0.5)],
        "warm_start.min_lr does nothing: the schedule is constant",
    ),
    (
        ["dataflow=ppo", CRITIC, "roles.critic.optimizer.min_lr=1e-5"],
        "remove it, or set roles.NAME.optimizer.schedule",
    ),
]


@pytest.mark.parametrize(("overrides", "what"), IDLE)
def test_what_nothing_reads(workspace: Path, overrides: list[str], what: str | None) -> None:
    found = [fault for fault in faults_of(*overrides) if "does nothing" in fault]
    if what is None:
        assert found == []
    else:
        assert len(found) == 1 and what in found[0], found


def test_a_frozen_model_has_no_optimizer(workspace: Path) -> None:
    teacher = "roles.teacher={head: vocabulary, model: model, colocate: actor}"
    told = ["dataflow=distill", teacher, "roles.reference=null", "roles.reward=null"]
    told += ["algorithm.kl={}", "data.samples_per_prompt=1"]
    assert faults_of(*told) == []
    (found,) = faults_of(*told, "roles.teacher.optimizer={lr: 1e-3}")
    assert "roles.teacher.optimizer does nothing" in found and "the role is frozen" in found


def test_only_one_of_two_functions_is_there(workspace: Path) -> None:
    """A section may be read in part: token rewards that a role gives need no `token_rewards`."""
    Path("mine.py").write_text("def score(prompt, response, answer, row): return [1.0]\n")
    graph = (ROOT / "recipes/dataflows/ppo.yaml").read_text()
    by_token = next(line for line in graph.splitlines(True) if "function: token_rewards" in line)
    graph = graph.replace(by_token, "").replace(
        ", {token_rewards: token_scores}]", ", token_rewards]", 1
    )
    Path("flow.yaml").write_text(graph)
    told = ["dataflow=flow.yaml", CRITIC, "roles.reward={function: mine.py:score, level: token}"]
    assert faults_of(*told, "algorithm.gae={lam: 0.9}") == []
    (found,) = faults_of(*told, "algorithm.gae={lam: 0.9, whiten_rewards: true}")
    assert "gae.whiten_rewards does nothing: the dataflow has no token_rewards" in found


def test_a_function_reads_what_losses_do_not(workspace: Path) -> None:
    """PRIME's advantages read beta under a model that is not trained."""
    graph = (ROOT / "recipes/dataflows/prime.yaml").read_text()
    lines = [line for line in graph.splitlines(True) if not line.startswith(("  label", "  learn"))]
    Path("flow.yaml").write_text("".join(lines).replace("[publish, learn]", "[publish]"))
    role = "roles.prm={head: vocabulary, model: model, colocate: actor}"
    assert faults_of("dataflow=flow.yaml", role, "algorithm.preference.beta=0.05") == []
