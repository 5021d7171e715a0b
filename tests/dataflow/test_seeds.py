"""Nodes that sample the same prompts in one step draw apart; the first draws as it did alone."""

from types import SimpleNamespace
from typing import Any, cast

from hybridflow.dataflow.operations import _generate
from hybridflow.dataflow.steps import StepContext
from hybridflow.recipe.graph import Graph, Node


def seeds(*ways: str) -> list[int]:
    """Of nodes that sample in these ways, in one step."""
    nodes = [
        Node(f"n{number}", role="rollout", call="generate", options={"sampling": way})
        for number, way in enumerate(ways)
    ]
    team = SimpleNamespace(
        state={"temperature": 1.0},
        sampling=lambda temperature, seed: seed,
        make_room=lambda: None,
        rollout=SimpleNamespace(generate=lambda batch, samples, seed: seed),
    )
    evaluation = SimpleNamespace(samples_per_prompt=1, temperature=0.5)
    around: Any = SimpleNamespace(
        recipe=SimpleNamespace(seed=3, evaluation=evaluation),
        stage=SimpleNamespace(graph=Graph((), tuple(nodes)), samples_per_prompt=2),
        team=team,
    )
    context = StepContext("main", 1, 1, 5)
    return [cast(Any, _generate)(node, around, None, context) for node in nodes]


def test_two_nodes_of_one_way_draw_apart() -> None:
    (alone,) = seeds("training")
    first, second, held_out = seeds("training", "training", "evaluation")
    assert first == alone == held_out, "its prompts are others"
    assert second != first and 0 <= second < 2**31
