"""Graphs: order, faults of structure and type, the same objects from YAML and Python."""

from pathlib import Path

import pytest

from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.faults import RecipeError
from hybridflow.recipe.graph import Graph, Node, Repeat, fields
from hybridflow.recipe.graph_check import type_faults
from hybridflow.recipe.graph_load import load_graph, parse_graph
from hybridflow.recipe.source import parse_yaml

KINDS = {"actor": "model", "reference": "model", "rollout": "rollout", "reward": "reward"}

GENERATE = "generate: {role: rollout, call: generate, in: [prompts], out: [responses]}"
SCORE = "score: {role: reward, call: score, in: [prompts, answers, responses], out: [rewards]}"
ADVANTAGE = "advantage: {function: group_relative, in: [rewards], out: [advantages]}"
UPDATE = "update: {role: actor, call: update, in: [prompts, responses, advantages], loss: ppo_clip}"
PUBLISH = "publish: {role: actor, call: publish, to: rollout, after: [update]}"
NODES = (GENERATE, SCORE, ADVANTAGE, UPDATE, PUBLISH)


def test_which_fields_stem_from_sampling():
    sampled = {"dapo": "kept_responses", "grpo": "eval_responses", "distill": "teacher_logprobs"}
    for name, field in sampled.items():
        assert load_graph(SHIPPED / f"{name}.yaml").is_sampled(field), name
    brought = {"kto": "rotated", "sft": "targets", "grpo": "prompts"}
    for name, field in brought.items():
        assert not load_graph(SHIPPED / f"{name}.yaml").is_sampled(field), name


@pytest.mark.parametrize("every", [None, "end", 1, 3, 7, 20])
def test_the_number_of_steps_in_which_a_node_is_due(every: int | str | None):
    node = Node("n", every=every)
    for steps in range(1, 15):
        for first in range(1, 17):
            due = [step for step in range(first, steps + 1) if node.due(step, steps)]
            assert node.due_count(first, steps) == len(due), (first, steps)


def faults_of(*nodes: str, inputs: str = "[prompts, answers]") -> list[str]:
    """Faults of a graph written one node a line, the first on line 3."""
    lines = "".join(f"  {node}\n" for node in nodes)
    source = parse_yaml(f"inputs: {inputs}\nnodes:\n{lines}", "g.yaml")
    assert source.faults == []
    graph, faults = parse_graph(source.data, source.origin)
    assert graph is not None
    return [str(fault) for fault in faults + type_faults(graph, KINDS, ["actor"])]


def replaced(old: str, new: str) -> tuple[str, ...]:
    changed = tuple(node.replace(old, new) for node in NODES)
    assert changed != NODES
    return changed


def test_a_sound_graph_has_no_fault():
    assert faults_of(*NODES) == []


CASES = [
    ("in: [rewards]", "in: [rewads]", "g.yaml:5: node 'advantage' consumes 'rewads'", "'rewards'"),
    ("out: [responses]", "out: [rewards]", "'rewards', which node", "rename it"),
    ("out: [responses]", "out: [prompts]", "'prompts', which the inputs", "rename it"),
    ("in: [rewards]", "in: [{rewards: responses}]", "tokens of int", "fields that fit: rewards"),
    ("role: rollout", "role: rolout", "the role 'rolout', which the recipe lacks", "'rollout'"),
    ("group_relative", "group_relativ", "unknown function", "did you mean 'group_relative'?"),
    ("call: update", "call: updat", "(model) has no call 'updat'", "did you mean 'update'?"),
    ("[prompts, answers, responses]", "[prompts, answers]", "lacks the input 'responses'", "fit"),
    ("after: [update]", "after: [upate]", "comes after 'upate'", "did you mean 'update'?"),
    ("to: rollout", "to: actor", "which is no rollout role", "add `to: rollout`"),
    ("to: rollout, ", "", "publishes to None", "add `to: rollout`"),
    ("role: actor, call: update", "role: reference, call: update", "is frozen", "actor"),
    ("loss: ppo_clip", "loss: ppo_clp", "`loss` of node 'update' must be one of", "ppo_clip"),
    (", loss: ppo_clip", "", "lacks `loss`", "ppo_clip"),
    ("loss: ppo_clip", "loss: ppo_clip, evry: 2", "unknown key 'evry'", "did you mean 'every'?"),
    ("after: [update]", "every: evaluatio", "no section", "did you mean 'evaluation'?"),
    ("after: [update]", "every: 0", "`every` is 0", "at least 1"),
    ("after: [update]", "when: of_policy", "unknown condition", "'off_policy'"),
    ("after: [update]", "delay: {advantages: 1}", "does not consume", "valid"),
    ("loss: ppo_clip", "loss: ppo_clip, delay: {advantages: 0}", "`delay` is not", "1 step"),
    ("in: [rewards]", "in: [{reward: rewards}]", "no parameter 'reward'", "'rewards'"),
    (
        "out: [advantages]",
        "out: [{advantage: advantages}]",
        "no output 'advantage'",
        "'advantages'",
    ),
    ("group_relative", "group_relative, role: actor", "neither a call of a role nor", "alone"),
    ("in: [rewards]", "in: rewards", "`in` is not a list", "write"),
    ("in: [rewards]", "in: [rewards], repeat_until: {cap: 2}", "takes exactly", "condition"),
]


@pytest.mark.parametrize(("old", "new", "what", "fix"), CASES)
def test_each_fault_names_line_and_fix(old: str, new: str, what: str, fix: str):
    found = faults_of(*replaced(old, new))
    assert any(what in f and fix in f.partition("Fix:")[2] for f in found), found
    assert all(fault.startswith("g.yaml:") for fault in found)


def test_unknown_inputs_and_cycles():
    assert "did you mean 'prompts'?" in faults_of(*NODES, inputs="[prompt, answers]")[0]
    first = "a: {function: shuffle, in: [{values: y}], out: [{shuffled: x}]}"
    second = "b: {function: shuffle, in: [{values: x}], out: [{shuffled: y}]}"
    found = faults_of(*NODES, first, second)
    assert len(found) == 1 and "a -> b -> a" in found[0]


def test_batches_do_not_mix():
    evaluation = "[prompts, answers, eval_prompts]"
    mixed = replaced("in: [prompts, responses, adv", "in: [{prompts: eval_prompts}, responses, adv")
    assert "mixes rows" in faults_of(*mixed, inputs=evaluation)[0]
    late = replaced("loss: ppo_clip", "loss: ppo_clip, delay: {advantages: 1}")
    assert "advantages (train, 1 steps before)" in faults_of(*late)[0]
    all_late = "delay: {prompts: 1, responses: 1, advantages: 1}"
    assert faults_of(*replaced("loss: ppo_clip", f"loss: ppo_clip, {all_late}")) == []


def dapo(**changes: object) -> Graph:
    settings = {"condition": "enough", "start": "generate", "cap": 4, **changes}
    kept = fields(
        kept_prompts="some_prompts",
        kept_responses="some_responses",
        kept_rewards="some_rewards",
        enough="enough",
    )
    taken = fields("prompts", "responses", "rollout_logprobs", "rewards")
    return Graph.build(
        ["prompts", "answers"],
        [
            Node(
                *("generate", "rollout", "generate"),
                inputs=fields("prompts"),
                outputs=fields("responses", "rollout_logprobs"),
            ),
            Node(
                *("score", "reward", "score"),
                inputs=fields("prompts", "answers", "responses"),
                outputs=fields("rewards"),
            ),
            Node(
                "keep",
                function="accumulate_signal",
                inputs=taken,
                outputs=kept,
                repeat_until=Repeat(**settings),  # type: ignore[arg-type]
            ),
            Node(
                "advantage",
                function="group_relative",
                inputs={"rewards": "some_rewards"},
                outputs=fields("advantages"),
            ),
            Node(
                *("update", "actor", "update"),
                inputs=fields("advantages", prompts="some_prompts", responses="some_responses"),
                options={"loss": "ppo_clip"},
            ),
        ],
    )


def test_repeat_until_runs_a_loop_again():
    graph = dapo()
    assert type_faults(graph, KINDS, ["actor"]) == []
    assert graph.loop(graph.node("keep")) == {"generate", "score", "keep"}
    for changes, message in (
        ({"condition": "enogh"}, "did you mean 'enough'?"),
        ({"start": "generat"}, "did you mean 'generate'?"),
        ({"start": "update"}, "from which nothing reaches it"),
    ):
        with pytest.raises(RecipeError) as caught:
            dapo(**changes)
        assert message in str(caught.value)
    assert "one bool" in str(type_faults(dapo(condition="some_rewards"), KINDS, ["actor"])[0])


def test_rows_from_within_and_from_behind_a_loop_do_not_mix():
    graph = dapo()
    update = graph.node("update")
    mixed = Node(
        *("update", "actor", "update"),
        inputs={**update.inputs, "prompts": "prompts"},
        options=update.options,
    )
    found = type_faults(Graph(graph.inputs, (*graph.nodes[:-1], mixed)), KINDS, ["actor"])
    assert "kept by keep" in str(found[0])


def test_a_reader_of_the_loop_waits_for_its_end():
    graph = dapo()
    extra = Node("look", function="shuffle", inputs={"values": "rewards"})
    wider = Graph(graph.inputs, (*graph.nodes, extra))
    assert "keep" in wider.dependencies(extra)


def test_order_of_the_shipped_graph():
    graph = load_graph(SHIPPED / "grpo.yaml")
    waits = {node.name: graph.dependencies(node) for node in graph.nodes}
    assert waits["update"] >= {"generate", "old", "ref", "advantage"}
    assert waits["publish"] >= {"generate", "update"}
    assert waits["eval_generate"] >= {"publish"}
    assert not waits["ref"] & {"score", "old"} and not waits["score"] & {"old", "ref"}
    assert [{node.name for node in wave} for wave in graph.waves()][1] == {"score", "old", "ref"}
    seen: set[str] = set()
    for node in graph.order:
        assert graph.dependencies(node) <= seen
        seen.add(node.name)


def test_listed_order_gives_way_to_fields_and_after():
    graph = Graph.build(
        ["prompts", "targets"],
        [
            Node("publish", "actor", "publish", to="rollout", after=("update",)),
            Node(
                *("update", "actor", "update"),
                inputs={"prompts": "prompts", "responses": "targets"},
                options={"loss": "cross_entropy"},
            ),
            Node("generate", "rollout", "generate", inputs=fields("prompts")),
        ],
    )
    assert [node.name for node in graph.order] == ["update", "publish", "generate"]


def test_delayed_fields_are_no_dependency():
    late = {"prompts": 1, "responses": 1, "advantages": 1}
    nodes = [
        Node(
            *("update", "actor", "update"),
            inputs=fields("prompts", "responses", "advantages"),
            delay=late,
            options={"loss": "ppo_clip"},
        ),
        Node(
            "generate", "rollout", "generate", inputs=fields("prompts"), outputs=fields("responses")
        ),
        Node(
            *("score", "reward", "score"),
            inputs=fields("prompts", "answers", "responses"),
            outputs=fields("rewards"),
        ),
        Node(
            "advantage",
            function="group_relative",
            inputs=fields("rewards"),
            outputs=fields("advantages"),
        ),
    ]
    graph = Graph.build(["prompts", "answers"], nodes)
    assert type_faults(graph, KINDS, ["actor"]) == []
    assert [node.name for node in graph.waves()[0]] == ["update", "generate"]


def test_yaml_and_python_give_equal_graphs(tmp_path: Path):
    text = """\
inputs: [prompts, targets]
nodes:
  learn: {role: actor, call: update, in: [prompts, {responses: targets}], loss: cross_entropy}
  send: {role: actor, call: publish, to: rollout, after: [learn], every: end, out: [weight_version]}
"""
    (tmp_path / "g.yaml").write_text(text)
    graph = Graph.build(
        ["prompts", "targets"],
        [
            Node(
                *("learn", "actor", "update"),
                inputs=fields("prompts", responses="targets"),
                options={"loss": "cross_entropy"},
            ),
            Node(
                *("send", "actor", "publish"),
                to="rollout",
                after=("learn",),
                every="end",
                outputs=fields("weight_version"),
            ),
        ],
    )
    loaded = load_graph(tmp_path / "g.yaml")
    assert loaded == graph
    assert loaded.node("send").origin.endswith("g.yaml:4")


def test_building_from_python_reports_faults_too():
    with pytest.raises(RecipeError, match="two nodes are named 'a'"):
        Graph.build([], [Node("a", function="shuffle"), Node("a", function="shuffle")])
    with pytest.raises(RecipeError, match="has no nodes"):
        Graph.build([], [])


def test_when_a_node_is_due():
    def steps(every: int | str | None) -> list[int]:
        node = Node("n", function="shuffle", every=every)
        return [step for step in range(1, 8) if node.due(step, steps=7)]

    assert steps(None) == [1, 2, 3, 4, 5, 6, 7]
    assert steps(3) == [3, 6, 7]
    assert steps("end") == [7]
