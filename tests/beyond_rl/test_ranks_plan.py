"""What torchrun cannot run is said before anything starts."""

import pytest

from hybridflow.dataflow.launch_ranks import check_plan
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe

CASES = [
    ("sft", ["roles.actor.parallel.dp=4"], "layout has 4 ranks, torchrun has started 2"),
    (
        "dpo",
        ["roles.reference={}"],
        "and reference would have others than the actor.*`colocate: actor`",
    ),
    ("dpo", ["roles.reference={colocate: actor, parallel: {tp: 2}}"], "`colocate: actor`"),
]


@pytest.mark.parametrize(("dataflow", "overrides", "message"), CASES)
def test_a_plan_that_does_not_fit_is_refused(write_recipe, dataflow, overrides, message):
    told = ["roles.actor.parallel.dp=2", *overrides]
    plan = compile_recipe(load_recipe(write_recipe(dataflow), told))
    with pytest.raises(ValueError, match=message):
        check_plan(plan, 2)


def test_a_reward_model_fits(write_recipe):
    told = ["roles={reward: {head: value, parallel: {dp: 2}, optimizer: {lr: 1e-3}}}"]
    check_plan(compile_recipe(load_recipe(write_recipe("reward_model"), told)), 2)


def test_a_plan_that_fits(write_recipe):
    told = ["roles.actor.parallel.dp=2", "roles.reference={colocate: actor}"]
    check_plan(compile_recipe(load_recipe(write_recipe("dpo"), told)), 2)
