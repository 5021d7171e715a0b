"""From what the nodes of a step returned to its metrics and rollouts.

Nodes are found by what they call, never by their names or those of their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybridflow.batch import Batch, Ragged
from hybridflow.dataflow.measures import advantage_metrics, reference_kl, source_means
from hybridflow.dataflow.reward_roles import is_constant, score_metrics
from hybridflow.dataflow.rounds import (
    all_rounds,
    kept_metrics,
    length_metrics,
    of_sampling,
    reward_metrics,
    round_metrics,
)
from hybridflow.dataflow.steps import StepOutcome
from hybridflow.recipe.graph import Graph, Node
from hybridflow.recipe.plan import ACTOR
from hybridflow.weight_sync.publication import PublishReport
from hybridflow.workers.reward import COMPONENT

Decode = Callable[[list[list[int]]], list[str]]


class Observer:
    """Reads the step outcomes of one stage.

    Args:
        decode: turns rows of token ids into texts.
        source_column: of the data, whose values get mean rewards of their own.
        lead: the role whose updates are ``update/...``; those of others have their role's name.
            Further ones of a role in the same step have their node's name too.
        sources: values of the column that have a metric, by the metric; grows by new ones.
    """

    def __init__(
        self,
        graph: Graph,
        kinds: Mapping[str, str],
        decode: Decode,
        source_column: str | None = None,
        lead: str | None = ACTOR,
        sources: dict[str, list[str]] | None = None,
    ) -> None:
        self._decode, self._graph, self._source = decode, graph, source_column
        evaluated = _reached_from(graph, "eval_")
        self._evaluated = evaluated
        self._generating = [n for n in graph.nodes if _is(n, kinds, "rollout", "generate")]
        scorers = ("reward", "value")
        self._scoring = [
            n for n in graph.nodes if any(_is(n, kinds, kind, "score") for kind in scorers)
        ]
        self._updating = [n for n in graph.nodes if n.role is not None and n.call == "update"]
        self._measuring = [n for n in graph.nodes if n.role is not None and n.call == "evaluate"]
        self._prefixes = _prefixes(self._updating, lambda n: "update" if n.role == lead else n.role)
        self._prefixes |= _prefixes(self._measuring, lambda n: "eval")
        self._loops = [n for n in graph.nodes if n.repeat_until is not None]
        self._publishing = [n for n in graph.nodes if _is(n, kinds, "model", "publish")]
        self._training_scores = [n for n in self._scoring if n.name not in evaluated]
        self._sources = {} if sources is None else sources
        self._costs = [n.inputs["costs"] for n in graph.nodes if n.function == "lagrangian"]
        self._labels = [n.outputs["labels"] for n in graph.nodes if n.function == "outcome_labels"]
        self._main_reward = _main_reward(graph, self._training_scores)
        costs = frozenset(
            n.role for n in self._training_scores if n.outputs.get("rewards") in self._costs
        )
        self._sampled_main = _sampler(graph, self._main_reward)
        self._names = _score_names(self._scoring, evaluated, self._main_reward, costs)
        self._first_of_role = _first_of_role(self._scoring, evaluated)

    def metrics(self, outcome: StepOutcome, published: PublishReport | None) -> dict[str, float]:
        """Every scalar of the step, by ``group/name``."""
        whole = all_rounds(self._graph, outcome)
        found = self._rewards(whole) | reference_kl(self._graph, outcome)
        for node in self._ran(self._generating, outcome):
            found |= self._lengths(node, whole.results[node.name])
            if node.name not in self._evaluated:
                took = outcome.timings.seconds[node.name]
                found["generate/seconds"] = found.get("generate/seconds", 0.0) + took
        for node in self._ran(self._loops, outcome):
            found = of_sampling(found) | round_metrics(node, outcome, whole)
            found |= kept_metrics(node, outcome)
        for node in self._ran(self._updating, outcome):
            measured = outcome.results[node.name]["metrics"]
            prefix = self._prefixes[node.name]
            found |= {f"{prefix}/{name}": value for name, value in measured.items()}
            found[f"{prefix}/seconds"] = outcome.timings.seconds[node.name]
            found |= advantage_metrics(node, outcome)
        for node in self._ran(self._measuring, outcome):
            measured = outcome.results[node.name]["metrics"]
            prefix = self._prefixes[node.name]
            found |= {f"{prefix}/{name}": value for name, value in measured.items()}
        for node in self._ran(self._publishing, outcome):
            found["weights/version"] = float(outcome.results[node.name]["weight_version"])
            if published is not None:
                found["publish/bytes"] = float(published.bytes)
                found["publish/seconds"] = outcome.timings.seconds[node.name]
                found |= {f"publish/{s}_seconds": took for s, took in published.seconds.items()}
                found["publish/engines"] = float(len(published.checksums))
        return found

    def rollouts(self, outcome: StepOutcome) -> Iterator[dict[str, Any]]:
        """Every sampled response of the step, of all its rounds, as rows for ``rollouts.jsonl``."""
        whole = all_rounds(self._graph, outcome)
        for node in self._ran(self._generating, outcome):
            yield from self._rows(node, whole)

    def _ran(self, nodes: list[Node], outcome: StepOutcome) -> list[Node]:
        return [node for node in nodes if node.name in outcome.results]

    def _rewards(self, outcome: StepOutcome) -> dict[str, float]:
        found: dict[str, float] = {}
        for node in self._ran(self._scoring, outcome):
            result, name = outcome.results[node.name], self._names[node.name]
            role = str(node.role)
            label = (
                role if node.name in self._first_of_role else f"{role}/{name.rpartition('/')[2]}"
            )
            prefix = "eval/" if node.name in self._evaluated else ""
            scores = score_metrics(role, result, label)
            found |= {f"{prefix}{key}": value for key, value in scores.items()}
            if self._source is not None:
                found |= source_means(
                    node, outcome, self._source, name, self._sources.setdefault(name, [])
                )
            if prefix:
                found[name] = result["rewards"].double().mean().item()
            elif len(self._training_scores) > 1 and "rewards" in node.outputs:
                found[f"reward/{node.outputs['rewards']}/mean"] = (
                    result["rewards"].double().mean().item()
                )
            if not prefix and node.name in self._first_of_role:
                found |= self._constants(name, label, result)
        for name in (name for name in self._costs if name in outcome.fields):
            found["cost/mean"] = outcome.fields[name].data.double().mean().item()
        for name in (name for name in self._labels if name in outcome.fields):
            found["reward/good_share"] = outcome.fields[name].data.float().mean().item()
        if self._main_reward in outcome.fields:
            rewards_S = outcome.fields[self._main_reward].data
            found |= reward_metrics(rewards_S)
            found["reward/constant"] = is_constant(rewards_S)
        return found

    def _constants(self, name: str, label: str, result: Batch) -> dict[str, float]:
        """Whether a reward beside the main one, or one of several functions, never changes."""
        values = {} if name == "reward" else {name: result["rewards"]}
        parts = {f.partition(":")[2]: d for f, d in result.fields.items() if _is_part(f)}
        values |= {f"reward/{label}/{part}": data for part, data in parts.items()}
        return {f"{key}/constant": is_constant(rewards_S) for key, rewards_S in values.items()}

    def _lengths(self, node: Node, result: Batch) -> dict[str, float]:
        prefix = "eval/length" if node.name in self._evaluated else "length"
        if node.options.get("sampling") == "greedy":
            prefix = f"greedy/{prefix}"
        return length_metrics(prefix, result["responses"], result["finished"])

    def _rows(self, node: Node, outcome: StepOutcome) -> Iterator[dict[str, Any]]:
        result, groups = outcome.results[node.name], outcome.results[node.name].samples_per_prompt
        lengths = result["responses"].lengths.tolist()
        finished, versions = result["finished"].tolist(), result["versions"].tolist()
        texts = self._texts(result["responses"])
        prompts = self._texts(outcome.fields[node.inputs["prompts"]].data)
        rewards, answers = self._scores(node, outcome)
        trained = self._trained_rewards(node, outcome)
        for sample, text in enumerate(texts):
            scored = {name: values[sample] for name, values in rewards.items()}
            yield {
                "prompt": prompts[sample // groups],
                "response": text,
                "reward": trained[sample] if trained else next(iter(scored.values()), None),
                **({"rewards": scored} if len(scored) > 1 else {}),
                "length": lengths[sample],
                "finished": finished[sample],
                "version": versions[sample],
                "answer": answers[sample // groups] if answers else None,
                "evaluation": node.name in self._evaluated,
            }

    def _texts(self, rows: Ragged) -> list[str]:
        return self._decode([row.tolist() for row in rows.rows()])

    def _trained_rewards(self, node: Node, outcome: StepOutcome) -> list[float]:
        """What the advantages of a node's responses are made of; empty: of others, or of none."""
        if node is not self._sampled_main or self._main_reward not in outcome.fields:
            return []
        rewards = outcome.fields[self._main_reward].data.tolist()
        samples = len(outcome.results[node.name]["finished"])
        return rewards if len(rewards) == samples else []  # not of those that were kept

    def _scores(
        self, generating: Node, outcome: StepOutcome
    ) -> tuple[dict[str, list[float]], list[Any]]:
        """Rewards of a node's responses by field, and the answers they were scored against."""
        responses = generating.outputs.get("responses")
        rewards, answers = {}, []
        for node in self._ran(self._scoring, outcome):
            if node.inputs["responses"] == responses:
                field = node.outputs.get("rewards", str(node.role))
                rewards[field] = outcome.results[node.name]["rewards"].tolist()
                if "answers" in node.inputs:  # a reward model needs none
                    rows = outcome.fields[node.inputs["answers"]].data
                    answers = [row["answer"] for row in rows]
        return rewards, answers


def _is(node: Node, kinds: Mapping[str, str], kind: str, call: str) -> bool:
    return node.role is not None and kinds[node.role] == kind and node.call == call


def _main_reward(graph: Graph, scoring: list[Node]) -> str:
    """The field that advantages come from, else the first reward that the graph lists."""
    taken = [n.inputs["rewards"] for n in graph.nodes if n.function and "rewards" in n.inputs]
    scored = [node.outputs["rewards"] for node in scoring if "rewards" in node.outputs]
    return next(iter([*taken, *scored]), "")


def _sampler(graph: Graph, reward: str) -> Node | None:
    """The node that sampled the responses that a field of rewards is of."""
    fields = [reward]
    for field in fields:  # which grows
        node = graph.producers.get(field)
        if node is not None and node.call == "generate":
            return node
        inputs = () if node is None else node.inputs.values()
        fields.extend(name for name in inputs if name not in fields)
    return None


def _score_names(
    scoring: list[Node], evaluated: frozenset[str], main_reward: str, costs: frozenset[str | None]
) -> dict[str, str]:
    """What each scoring node's rewards are called: ``reward`` of the main one, or the first where
    that is made of others, ``reward/FIELD`` of further ones; with ``eval/`` before it likewise, and
    ``eval/cost`` of the role that scores the costs."""
    found: dict[str, str] = {}
    for prefix, nodes in (
        ("", [n for n in scoring if n.name not in evaluated]),
        ("eval/", [n for n in scoring if n.name in evaluated]),
    ):
        main = next((n for n in nodes if n.outputs.get("rewards") == main_reward), None)
        for node in nodes:
            field = node.outputs.get("rewards", str(node.role))
            further = node is not (main or nodes[0])
            found[node.name] = f"{prefix}reward/{field}" if further else f"{prefix}reward"
            if prefix and node.role in costs:
                found[node.name] = f"{prefix}cost"
    return found


def _first_of_role(scoring: list[Node], evaluated: frozenset[str]) -> frozenset[str]:
    """The first scoring node of each role, in training and in evaluation."""
    first: dict[tuple[str | None, bool], str] = {}
    for node in scoring:
        first.setdefault((node.role, node.name in evaluated), node.name)
    return frozenset(first.values())


def _prefixes(nodes: list[Node], name_of: Callable[[Node], str | None]) -> dict[str, str]:
    """Before each node's metrics: ``name_of`` it where no other has that name, or it is the first
    that takes advantages, which are what a step is about; else also the node's name."""
    found: dict[str, str] = {}
    for node in sorted(nodes, key=lambda n: "advantages" not in n.inputs):
        name = str(name_of(node))
        found[node.name] = f"{name}/{node.name}" if name in found.values() else name
    return found


def _is_part(field: str) -> bool:
    return field.partition(":")[0] == COMPONENT


def _reached_from(graph: Graph, prefix: str) -> frozenset[str]:
    """Nodes that read, directly or not, an input whose name begins with ``prefix``."""
    fields = {name for name in graph.inputs if name.startswith(prefix)}
    reached: set[str] = set()
    for node in graph.order:
        if fields & set(node.inputs.values()):
            reached.add(node.name)
            fields |= set(node.outputs.values())
    return frozenset(reached)
