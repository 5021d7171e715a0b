"""Every dataflow without a critic trains the tiny model: a real engine, a real rollout server."""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.cluster import LocalSession
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.dataflow.live_values import live_values
from hybridflow.dataflow.state import SharedState
from hybridflow.dataflow.team import Team
from hybridflow.monitor import read_metrics
from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.checks import check
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.plan import Plan
from tests.dataflow.reported import assert_reported

SEQUENCE = "algorithm.aggregation=sequence_mean_token_mean"
DATAFLOWS = {
    "rloo": [],
    "remax": ["algorithm.aggregation=sequence_mean_token_sum"],
    "grpo_full_kl": [
        "algorithm.kl={coef: 0.1, estimator: full}",
        "roles.reference={colocate: actor}",
    ],
    "prime": [
        "roles.prm={head: vocabulary, optimizer: {lr: 1e-3}, colocate: actor}",
        "roles.reference={colocate: actor}",
        "algorithm.preference.beta=0.05",
    ],
    "dapo": ["algorithm.clip=[0.2, 0.28]"],
    "opo": [],
    "gpg": [],
    "gdpo": ["roles.format={function: length, parameters: {budget: 3}}"],
    "reinforce_pp": ["data.samples_per_prompt=1"],
    "reinforce_pp_baseline": ["algorithm.aggregation=constant", "algorithm.loss_divisor=5.0"],
    "gspo": ["algorithm.clip=[3e-4, 4e-4]", SEQUENCE],
    "gmpo": ["algorithm.clip=0.4", SEQUENCE],
    "cispo": ["algorithm.clip=[0.9, 4.0]"],
    "sapo": ["algorithm.sapo={tau_negative: 1.5}", SEQUENCE],
}


def overrides_of(name: str, folder: Path) -> list[str]:
    """One step of two mini-batches, with rewards that differ on an untrained model."""
    scorer = folder / "varied.py"
    scorer.write_text(
        "def varied(prompt, response, answer, row):\n    return sum(map(ord, response)) % 7\n"
    )
    return [
        *(f"dataflow={name}", f"roles.reward.function={scorer}:varied", "steps=1"),
        *("roles.actor.mini_batches=2", "warm_start=null", "evaluation=null", "export=false"),
        *("checkpoint.every=null", "roles.actor.optimizer={lr: 1e-4}"),
        *DATAFLOWS.get(name, []),
    ]


def run(recipe) -> dict[str, float]:
    """Metrics of the last step of a recipe that has no fault."""
    assert check(recipe) == []
    plan = compile_recipe(recipe)
    folder = train(plan, lambda logs: LocalSession(), LaunchOptions(live=False))
    return list(read_metrics(folder))[-1]["metrics"]


@pytest.mark.slow  # the shipped recipes of these run in test_twins.py
@pytest.mark.parametrize("name", DATAFLOWS)
def test_a_step_of_every_dataflow(make_recipe, tmp_path, name: str) -> None:
    recipe = make_recipe(*overrides_of(name, tmp_path))
    metrics = run(recipe)
    assert metrics["update/grad_norm"] > 0 and metrics["reward/std"] > 0
    assert metrics["weights/version"] == 1
    assert_reported(metrics, compile_recipe(recipe).stages[-1].graph)
    if name == "grpo_full_kl":
        assert metrics["update/kl"] > 0
    if name == "prime":
        assert metrics["prm/loss"] > 0 and 0 <= metrics["prm/outcome_accuracy"] <= 1
    if name == "remax":
        assert "greedy/length/mean" in metrics and "reward/greedy_rewards/mean" in metrics
    if name != "gpg":
        assert metrics["update/ratio_mean"] == pytest.approx(1, abs=0.2)


PUBLISHED = {
    "ppo_clip": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "gmpo": (0.4, 0.4),
    "cispo": (1.0, 0.2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_loss_has_the_bounds_of_its_paper_where_the_recipe_tells_none(make_recipe, name) -> None:
    for told, bounds in (("null", PUBLISHED[name]), ("[0.1, 0.3]", (0.1, 0.3))):
        plan = compile_recipe(make_recipe(f"algorithm.clip={told}", "warm_start=null"))
        node = replace(plan.stages[-1].graph.node("update"), options={"loss": name})
        loss = team_of(plan).loss(plan.stages[-1], node)
        assert (loss.clip_low, loss.clip_high) == bounds


def team_of(plan: Plan) -> Team:
    """One that has no worker."""
    team = object.__new__(Team)
    team.recipe, team.state, team.publisher = plan.recipe, SharedState(live_values(plan)), None
    team.version = 0
    return team


def test_a_model_beside_the_policy_has_no_correction(make_recipe, tmp_path) -> None:
    """PRIME's learns from outcomes: it gets neither old nor the rollout's log-probabilities."""
    told = (
        *("algorithm.rollout_correction={method: masked, high: 2}", "algorithm.entropy_coef=0.1"),
        "roles.rollout.sampling.temperature=0.5",
    )
    plan = compile_recipe(make_recipe(*overrides_of("prime", tmp_path), *told))
    team, stage = team_of(plan), plan.stages[-1]
    policy, process = (team.loss(stage, stage.graph.node(n)) for n in ("update", "learn"))
    assert policy.correction is not None and policy.entropy_coef == 0.1
    assert process.correction is None and process.entropy_coef == 0
    assert process.temperature == policy.temperature == 0.5


def test_what_the_data_bring_is_not_of_the_samplers_temperature(make_recipe, tmp_path) -> None:
    """Demonstrations beside a rollout, and the warm start, whose average is not the algorithm's."""
    told = (
        *("roles.rollout.sampling.temperature=0.5", "algorithm.entropy_coef=0.1"),
        *("algorithm.aggregation=constant", "algorithm.loss_divisor=5.0"),
        "warm_start={steps: 1, prompts_per_step: 4, lr: 1e-3}",
    )
    plan = compile_recipe(make_recipe(*overrides_of("grpo", tmp_path), *told))
    team, (warm, main) = team_of(plan), plan.stages
    policy = team.loss(main, main.graph.node("update"))
    assert (policy.temperature, policy.aggregation, policy.loss_divisor) == (0.5, "constant", 5)
    supervised = {"responses": "targets"}
    beside = replace(
        main.graph.node("update"), inputs=supervised, options={"loss": "cross_entropy"}
    )
    loss = team.loss(main, beside)
    assert (loss.temperature, loss.entropy_coef, loss.aggregation) == (1, 0, "constant")
    loss = team.loss(warm, warm.graph.node("update"))
    assert (loss.temperature, loss.aggregation, loss.loss_divisor) == (1, "token_mean", 1)


@pytest.mark.parametrize(
    "filtering", [pytest.param(False, marks=pytest.mark.slow, id="shaping"), True]
)
def test_dapo_over_several_rounds(make_recipe, tmp_path, filtering: bool) -> None:
    """A sparse reward: rounds go on until every group has a signal; overlong responses are
    punished, or take no part."""
    graph = (SHIPPED / "dapo.yaml").read_text()
    if filtering:
        assert graph.count("      - advantages") == 1
        mask = "      - advantages\n      - {sample_mask: kept_finished}"
        graph = graph.replace("      - advantages", mask)
    path = tmp_path / "flow.yaml"
    path.write_text(graph)
    scorer = tmp_path / "sparse.py"
    scorer.write_text(
        "def sparse(prompt, response, answer, row):\n"
        "    return float(sum(map(ord, response)) % 5 == 0)\n"
    )
    overrides = [
        *overrides_of(str(path), tmp_path),
        *(f"roles.reward.function={scorer}:sparse", "data.samples_per_prompt=3"),
        # Long enough for some responses to end on their own.
        "warm_start={steps: 12, prompts_per_step: 16, lr: 3e-3}",
        *("algorithm.clip=[0.2, 0.28]", "roles.rollout.sampling.max_tokens=3"),
    ]
    metrics = run(make_recipe(*overrides))
    assert metrics["update/grad_norm"] > 0
    # What was cut off has three tokens; what is left are responses that ended on their own.
    assert filtering == (metrics["update/response_length_mean"] < 2.5)


def test_a_corrected_step(make_recipe, tmp_path) -> None:
    """Both engines compute the same in float32: corrections find nothing to correct."""
    overrides = [
        *overrides_of("grpo", tmp_path),
        *("roles.actor.mini_batches=1", "algorithm.entropy_coef=0.01"),
        "algorithm.rollout_correction={method: rejection, level: sequence, high: 1.01}",
        "algorithm.off_policy_mask={bound: 0.1}",
    ]
    metrics = run(make_recipe(*overrides))
    assert metrics["update/correction_share"] == metrics["update/off_policy_masked"] == 0
    assert metrics["update/correction_ess"] == pytest.approx(1)
    # The whole vocabulary's entropy, beside its estimate from the sampled tokens.
    assert metrics["update/entropy"] == pytest.approx(metrics["update/entropy_estimate"], rel=0.2)


@pytest.mark.slow
def test_the_kl_in_the_reward(make_recipe, tmp_path) -> None:
    """REINFORCE++ with the KL in the reward: the policy's and the reference's log-probabilities
    go into the advantage, not into the loss."""
    kl = "algorithm.kl={coef: 0.1, place: reward, estimator: k1}"
    told = [*overrides_of("reinforce_pp", tmp_path), "roles.reference={colocate: actor}"]
    told.append("steps=2")  # in the first step policy and reference are one
    metrics = run(make_recipe(*told, kl))
    without = run(make_recipe(*told, "algorithm.kl.coef=0", f"output={tmp_path / 'without'}"))
    assert metrics["update/grad_norm"] > 0 and metrics["reward/kl"] >= 0
    assert metrics["advantage/abs_mean"] != without["advantage/abs_mean"]
