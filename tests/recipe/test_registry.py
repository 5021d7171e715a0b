"""Names that a recipe may use: aliases find their entry, twice is an error, unknown lists all."""

from pathlib import Path

import pytest

from hybridflow.recipe import catalogue, catalogue_roles
from hybridflow.recipe.checks import check_file
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.graph import Node
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.registry import Registry, UnknownName
from hybridflow.recipe.schema_roles import RolesSection


def shapes() -> Registry[int]:
    return Registry(
        "shape", {"triangle": 3, "square": 4}, {"pentagon": 5}, aliases={"box": "square"}
    )


def test_entries_and_aliases() -> None:
    found = shapes()
    assert found["square"] == found["box"] == found.get("box") == 4
    assert found.canonical("box") == "square" and found.canonical("circle") == "circle"
    assert list(found) == ["triangle", "square", "pentagon"], "aliases are no names"
    assert "box" in found and "circle" not in found and found.get("circle") is None
    assert found.register("hexagon", 6, "honeycomb") == 6 == found["honeycomb"]


def test_an_unknown_name_lists_the_nearest_and_all() -> None:
    message = "unknown shape 'sqare'; did you mean 'square'\\? Valid: pentagon, square, triangle$"
    with pytest.raises(UnknownName, match=message):
        shapes()["sqare"]
    with pytest.raises(ValueError, match="'xyz'; valid: pentagon, square, triangle$"):
        shapes()["xyz"]


@pytest.mark.parametrize("name", ["square", "box"])
def test_registering_twice_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"the shape '{name}' is registered twice"):
        shapes().register(name, 1)
    with pytest.raises(ValueError, match=f"the shape '{name}' is registered twice"):
        shapes().register("new", 1, name)
    with pytest.raises(ValueError, match=f"the shape '{name}' is registered twice"):
        Registry("shape", {"square": 4, "box": 2}, {name: 4})


@pytest.mark.parametrize("name", ["", "a b", "a/b", "3d", "-a", "a.b"])
def test_what_a_recipe_could_not_name_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="is no name for a shape"):
        shapes().register(name, 1)


def test_roles_have_other_names_wherever_a_recipe_names_them(workspace: Path) -> None:
    assert set(catalogue_roles.ROLES) == set(RolesSection.model_fields)
    text = Path("recipe.yaml").read_text()
    assert "  actor:" in text and "  rollout:" in text
    wanted = load_recipe("recipe.yaml", ["roles.reference={colocate: actor}"])
    renamed = text.replace("  actor:", "  policy:").replace("  rollout:", "  sampler:")
    Path("recipe.yaml").write_text(renamed.replace("colocate: actor", "colocate: policy"))
    recipe = load_recipe("recipe.yaml", ["roles.ref={colocate: policy}"])
    assert recipe.roles == wanted.roles
    assert load_recipe("recipe.yaml", ["roles.policy.micro_batch_tokens=77"]).roles.actor
    node = Node("update", role="policy", call="publish", to="sampler")
    assert (node.role, node.to) == ("actor", "rollout")
    line = next(n for n, t in enumerate(renamed.splitlines(), 1) if "  policy:" in t)
    Path("recipe.yaml").write_text(renamed.replace("  policy:", "  policy: 3 #"))
    fault = check_file("recipe.yaml", [])[1][0]
    assert fault.where == f"recipe.yaml:{line}" and "roles.actor" in fault.what


def test_an_alias_needs_an_entry() -> None:
    with pytest.raises(ValueError, match="alias 'disc' is for no entry: unknown shape 'circle'"):
        Registry("shape", {"square": 4}, aliases={"disc": "circle"})


@pytest.mark.parametrize("table", [catalogue.FUNCTIONS, catalogue.LOSSES, catalogue.REWARDS])
def test_the_catalogue_has_registries(table: Registry) -> None:
    assert table.aliases
    assert all(table[alias] is table[name] for alias, name in table.aliases.items())


GRAPH = """{inputs: [prompts, answers], nodes: {
    g: {role: rollout, call: generate, in: [prompts], out: [responses]},
    s: {role: reward, call: score, in: [prompts, answers, responses], out: [rewards]},
    a: {function: %s, in: [rewards], out: [advantages]},
    u: {role: actor, call: update, in: [prompts, responses, advantages], loss: %s},
    p: {role: actor, call: publish, to: rollout, after: [u]}}}"""


def test_a_recipe_may_use_aliases(workspace: Path) -> None:
    """The compiled graph has the entries' own names, so that nothing else needs to know."""
    told = [
        "roles.reward.function=exact",
        "roles.reference=null",
        "algorithm.kl={}",
        "checkpoint={}",
        "evaluation=null",
        "dataflow=" + GRAPH % ("grpo", "ppo"),
    ]
    recipe, faults = check_file("recipe.yaml", told)
    assert not faults
    graph = compile_recipe(load_recipe("recipe.yaml", told)).stages[-1].graph
    assert graph.node("a").function == "group_relative"
    assert graph.node("u").options["loss"] == "ppo_clip"
    assert recipe is not None


def test_unknown_names_in_a_recipe(workspace: Path) -> None:
    told = ["roles.reward.function=exactmatch", "dataflow=" + GRAPH % ("grop", "ppo_clp")]
    found = [str(fault) for fault in check_file("recipe.yaml", told)[1]]
    assert any("did you mean 'grpo'? Valid: accumulate_signal, " in fault for fault in found)
    assert any("unknown reward 'exactmatch'" in f and "Valid: exact_match, " in f for f in found)
    assert any("ppo_clip" in fault for fault in found)


def test_nodes_from_python_too() -> None:
    node = Node("u", "actor", "update", options={"loss": "sft"})
    assert node == Node("u", "actor", "update", options={"loss": "cross_entropy"})
