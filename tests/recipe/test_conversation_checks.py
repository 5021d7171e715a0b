"""Whole conversations are trained on by the assistant's words alone."""

import json
from pathlib import Path

import pytest

from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.checks import check_file

TOLD = ["dataflow=flow.yaml", "data.messages_column=messages", "data.samples_per_prompt=1"]
TOLD += ["roles.reference=null", "roles.reward=null", "algorithm.kl={}"]


@pytest.mark.parametrize(
    ("mask", "turns", "what"),
    [
        ("{response_mask: target_mask}", "all", None),
        ("", "all", "add `{response_mask: target_mask}` to its inputs, or set data.turns to last"),
        ("", "last", None),
    ],
)
def test_a_mask_of_the_assistants_words(
    workspace: Path, mask: str, turns: str, what: str | None
) -> None:
    graph = (SHIPPED / "sft.yaml").read_text()
    assert "{response_mask: target_mask}" in graph
    graph = graph.replace(", {response_mask: target_mask}", mask and f", {mask}")
    if not mask:
        graph = graph.replace(", target_mask", "", 1)
    Path("flow.yaml").write_text(graph)
    words = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    for name in ("train", "eval"):
        Path(f"{name}.jsonl").write_text((json.dumps({"messages": words}) + "\n") * 12)
    found = [str(f) for f in check_file("recipe.yaml", [*TOLD, f"data.turns={turns}"])[1]]
    if what is None:
        assert found == []
    else:
        assert len(found) == 1 and "too, as words of the assistant" in found[0] and what in found[0]
