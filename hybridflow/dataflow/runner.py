"""Runs the nodes of a graph once: one after the other, or as soon as each is ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.recipe.graph import Graph, Node

RunNode = Callable[[Node], None]


class NodeError(RuntimeError):
    """A node failed; the message names it and its line in the dataflow's file."""

    def __init__(self, node: Node, cause: BaseException) -> None:
        place = f" ({node.origin})" if node.origin else ""
        super().__init__(f"node '{node.name}'{place} failed: {cause}")
        self.node = node
        self.cause = cause


@dataclass
class Timings:
    """Seconds by node name; a node that ran twice in a step counts both."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, node: str, seconds: float) -> None:
        self.seconds[node] = self.seconds.get(node, 0.0) + seconds


class Runner(Protocol):
    """Runs ``nodes`` so that each starts after those it depends on."""

    def run(self, graph: Graph, nodes: Iterable[Node], run_node: RunNode) -> None: ...


class SerialRunner:
    """One node at a time in the graph's order; the plain twin of the concurrent runner."""

    def run(self, graph: Graph, nodes: Iterable[Node], run_node: RunNode) -> None:
        chosen = {node.name for node in nodes}
        for node in graph.order:
            if node.name in chosen:
                _guarded(run_node, node)


class ConcurrentRunner:
    """Starts a node as soon as the nodes that it depends on have ended.

    The first failure ends the run of the graph: nodes that have not begun are dropped, and
    those that run are left to the session, which ends their workers.
    """

    def __init__(self, threads: int = 16) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="node")

    def run(self, graph: Graph, nodes: Iterable[Node], run_node: RunNode) -> None:
        chosen = {node.name for node in nodes}
        waiting = {node.name: node for node in graph.order if node.name in chosen}
        running: dict[Future[None], str] = {}
        ended: set[str] = set()
        while waiting or running:
            for name, node in list(waiting.items()):
                if graph.dependencies(node) & chosen <= ended:
                    del waiting[name]
                    running[self._pool.submit(_guarded, run_node, node)] = name
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                ended.add(running.pop(future))
                future.result()

    def close(self) -> None:
        """Drop what has not begun; does not wait for what runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _guarded(run_node: RunNode, node: Node) -> None:
    try:
        run_node(node)
    except NodeError:
        raise
    except Exception as cause:
        raise NodeError(node, cause) from cause


class NodeFields(Protocol):
    """Where nodes read and keep fields."""

    def batch_of(self, node: Node) -> Batch: ...
    def keep(self, node: Node, result: Batch) -> None: ...


def timed(
    timings: Timings,
    fields: NodeFields,
    operations: Mapping[str, Callable[[Batch], Batch]],
) -> RunNode:
    """A ``RunNode`` that gives each node its batch, keeps its outputs and its seconds."""

    def run_node(node: Node) -> None:
        start = time.perf_counter()
        fields.keep(node, operations[node.name](fields.batch_of(node)))
        timings.add(node.name, time.perf_counter() - start)

    return run_node
