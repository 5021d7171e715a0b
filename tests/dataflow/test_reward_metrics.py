"""Rewards of several nodes and roles keep metrics of their own."""

from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.dataflow.fields import Fields, Value
from hybridflow.dataflow.observer import Observer
from hybridflow.dataflow.steps import StepContext, StepOutcome
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
VALUES = {"rewards": 1.0, "costs": 0.25, "greedy_rewards": 0.5, "eval_rewards": 0.75}
ROWS = [{"answer": "1", "source": "easy"}, {"answer": "2", "source": "hard"}]


def metrics_of(name: str) -> dict[str, float]:
    """Of a step whose scores are ``VALUES``; each training sample of ``rewards`` failed."""
    plan = compile_recipe(load_recipe(RECIPES / f"{name}.yaml"))
    graph = plan.stages[-1].graph
    observer = Observer(graph, plan.recipe.roles.kinds(), lambda rows: [], "source")
    outcome = StepOutcome(StepContext("main", 1, 1, 1), Fields())
    for inputs in ("answers", "eval_answers"):
        outcome.fields.put(inputs, Value(Axis.PROMPTS, ROWS, 2))
    for node in (node for node in graph.nodes if node.call == "score"):
        rewards_S = torch.full((2,), VALUES[node.outputs["rewards"]])
        failed_S = torch.full((2,), int(node.name == "score"), dtype=torch.int8)
        fields = {"rewards": rewards_S, f"failed:{node.role}": failed_S}
        result = Batch(fields, dict.fromkeys(fields, Axis.SAMPLES), 2, 1)
        outcome.results[node.name] = result
        outcome.fields.store(node.outputs, result)
    return observer.metrics(outcome, None)


@pytest.mark.parametrize(
    ("recipe", "further", "name"),
    [("quickstart_safe_rlhf", 0.25, "costs"), ("quickstart_remax", 0.5, "greedy_rewards")],
)
def test_a_further_reward_does_not_take_the_names_of_the_main_one(recipe, further, name) -> None:
    found = metrics_of(recipe)
    assert found["reward/mean"] == found["reward/source/easy"] == found["reward/source/hard"] == 1
    assert found[f"reward/{name}/source/easy"] == found[f"reward/{name}/mean"] == further
    assert found["eval/reward"] == found["eval/reward/source/easy"] == 0.75
    assert found["reward/reward/errors"] == 2, "those of the samples that are trained on"
    other = "reward/cost/errors" if name == "costs" else "reward/reward/greedy_rewards/errors"
    assert found[other] == 0
    assert found["reward/constant"] == 1
    # The same function scores greedy responses, which may well all be right or wrong.
    assert found.get(f"reward/{name}/constant") == (1 if name == "costs" else None)
