"""Reward roles within whole runs in this process."""

import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster import LocalSession, WorkerDied
from hybridflow.cluster.transfer import GATHER, transfer
from hybridflow.dataflow.between_steps import Errand
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.dataflow.operations import CALLS, SCORE_GRACE_SECONDS, Surroundings
from hybridflow.dataflow.reward_roles import FailedSamples, score_metrics, swap_model
from hybridflow.dataflow.runner import NodeError, SerialRunner
from hybridflow.dataflow.scoring import Scoring
from hybridflow.dataflow.steps import StepContext
from hybridflow.dataflow.team import Team
from hybridflow.megatron.config import EngineConfig
from hybridflow.monitor import read_events, read_metrics
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe
from hybridflow.rewards import Failure, RewardError
from hybridflow.workers.model import ModelWorker
from hybridflow.workers.reward import ERROR, TIMEOUT, RewardWorker, _failures
from megatron_bridge.layout import ParallelLayout

ROOT = Path(__file__).parents[2]
CODES = {"right": [ERROR, TIMEOUT, 0, 0], "brief": [0, 0, ERROR, 0]}
SOURCE = """
import os

def odd(prompt, response, answer, row):
    if response.endswith(tuple("02468")):
        os._exit(7)
    return 1.0
"""


def run(recipe, runner=None, **options):
    plan = compile_recipe(recipe)
    options = LaunchOptions(live=False, **options)
    return train(plan, lambda logs: LocalSession(), options, runner or SerialRunner())


class Reloads(SerialRunner):
    """Asks for another parameter of the reward during the first step."""

    def __init__(self, teams):
        self._teams = teams

    def run(self, graph, nodes, run_node):
        super().run(graph, nodes, run_node)
        team = self._teams[-1]
        if not team.rewards.parameters:
            work = partial(team.rewards.reload, "reward", {"by": 3.0})
            team.between.ask("reward", Errand("a reload", work))


def test_parameters_that_a_reload_told_go_on_in_a_resumed_run(make_recipe, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def fn(p, r, a, row, *, by=1.0):\n    return by\n")
    told = (
        f"roles.reward={{function: '{tmp_path}/mine.py:fn'}}",
        "warm_start=null",
        "export=false",
    )
    teams, begin = [], Team.__init__

    def remember(self, *args):
        begin(self, *args)
        teams.append(self)

    monkeypatch.setattr(Team, "__init__", remember)
    run(make_recipe(*told, "evaluation=null", "steps=2"), Reloads(teams))
    with open(tmp_path / "mine.py", "a") as file:
        file.write("# changed\n")
    folder = run(make_recipe(*told, "evaluation=null", "steps=3"), resume=True)
    assert [row["metrics"]["reward/mean"] for row in read_metrics(folder)] == [1.0, 3.0, 3.0]
    events = [event["text"] for event in read_events(folder) if event["kind"] == "reload"]
    warnings = [e["text"] for e in read_events(folder) if e["kind"] == "warning"]
    assert any("of the reward 'reward.reward' is another one than at" in w for w in warnings)
    assert events == ["a reload: done", """'reward' goes on with {"reward": {"by": 3.0}}"""]


def test_several_functions_of_which_one_crashes_do_not_stop_a_run(make_recipe, tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    functions = (
        f"{{right: {{function: exact_match}}, odd: {{_target_: {tmp_path}/mine.py:odd, "
        "weight: 0.5, on_error: {value: 0.0}}}"
    )
    folder = run(
        make_recipe(
            "roles.reward.function=null",
            f"roles.reward.functions={functions}",
            "roles.reward.max_failed_share=1",
            "warm_start=null",
            "steps=1",
            "evaluation=null",
            "checkpoint.every=null",
            "export=false",
        )
    )
    (row,) = read_metrics(folder)
    metrics = row["metrics"]
    right, odd = (metrics[f"reward/reward/{name}/mean"] for name in ("right", "odd"))
    assert metrics["reward/mean"] == pytest.approx(right + 0.5 * odd, abs=1e-6)
    failed = metrics["reward/reward/odd/errors"]
    assert 0 < failed == pytest.approx((1 - odd) * 24)
    assert metrics["reward/reward/odd/timeouts"] == 0 and metrics["reward/constant"] == 0


def test_a_step_most_of_whose_samples_have_no_score_ends_the_run(make_recipe, tmp_path):
    (tmp_path / "mine.py").write_text("def fn(p, r, a, row):\n    raise KeyError('units')\n")
    recipe = make_recipe(
        f"roles.reward={{function: '{tmp_path}/mine.py:fn', on_error: {{value: 0.0}}}}",
        "warm_start=null",
        "evaluation=null",
        "checkpoint.every=null",
    )
    with pytest.raises(NodeError, match="24 of 24 samples .*'units'.*0.5 allows"):
        run(recipe)


def test_a_sample_on_which_any_function_fails_has_no_score(make_recipe):
    fields = {"rewards": torch.ones(4)}
    fields |= {f"failed:{n}": torch.tensor(codes, dtype=torch.int8) for n, codes in CODES.items()}
    result = Batch(fields, dict.fromkeys(fields, Axis.SAMPLES), 4, 1)

    class Group:
        def run(self, method):
            return ["", "the first"]

    group: Any = Group()
    failed = FailedSamples(make_recipe("roles.reward.max_failed_share=0.75"))
    assert "3 of 4 samples of 'reward' have no score; the first" in str(
        failed.see("reward", group, result)
    )
    assert failed.see("reward", group, result) is None, "told once"
    with pytest.raises(RewardError, match="max_failed_share=0.5 allows"):
        FailedSamples(make_recipe()).see("reward", group, result)
    outcomes = [Failure("error", ""), Failure("timeout", ""), 1.0, 0.5]
    assert _failures(outcomes).tolist() == CODES["right"]
    found = score_metrics("reward", result)
    assert [
        found[f"reward/reward/{n}/{kind}"] for n in CODES for kind in ("errors", "timeouts")
    ] == [
        *(1, 1),
        *(1, 0),
    ]


@contextmanager
def scoring(recipe, workers: int = 1):
    """The reward roles of a recipe, whose workers are threads of this process."""
    plan, groups = compile_recipe(recipe), {}
    with LocalSession() as session:

        def start(role, settings):
            return session.group(role, RewardWorker, workers, None, settings)

        rewards = Scoring(plan, groups, start)
        groups["reward"] = rewards.start("reward")
        yield rewards, groups


def test_a_role_is_loaded_anew_or_stays_as_it_is(make_recipe):
    with scoring(make_recipe("warm_start=null"), workers=2) as (rewards, _):
        rewards.reload("reward", {"strip": False})
        rewards.reload("reward")
        assert rewards.parameters == {"reward": {"reward": {"strip": False}}}
        with pytest.raises(ValueError, match="the parameters are no JSON"):
            rewards.reload("reward", {"strip": object()})
        with pytest.raises(ValueError, match="'reward' is unchanged: .*did you mean 'strip'"):
            rewards.reload("reward", {"strp": False})
        with pytest.raises(ValueError, match="no reward role 'rewards' .*did you mean 'reward'"):
            rewards.reload("rewards")
        with pytest.raises(ValueError, match="'reward' is unchanged: .*must be bool"):
            rewards.restore({"reward": {"reward": {"strip": "no"}}})
        with pytest.raises(ValueError, match="no reward role 'cost' is in service"):
            rewards.restore({"cost": {}})


def test_workers_that_take_the_place_of_others_run_the_same_code(make_recipe, tmp_path):
    """Also when the file has changed since, or is gone."""
    path = tmp_path / "mine.py"
    path.write_text("def fn(p, r, a, row, *, by=1.0):\n    return by\n")
    recipe = make_recipe(f"roles.reward={{function: '{path}:fn'}}", "warm_start=null")
    answers = [{"prompt_text": "1+1=", "answer": "2"}]
    fields = {"answers": answers, "responses": Ragged.from_rows([[3]])}
    batch = Batch(fields, {"answers": Axis.PROMPTS, "responses": Axis.TOKENS}, 1, 1)

    class Lost:
        def run(self, *args, **named):
            raise WorkerDied("reward", 0, "score", "its process has ended", "", "")

    with scoring(recipe) as (rewards, groups):

        def scored() -> list[float]:
            groups["reward"].close()
            groups["reward"] = Lost()
            result, repaired = rewards.score("reward", batch, 60.0)
            assert "were started anew" in repaired
            return result["rewards"].tolist()

        path.write_text("def fn(p, r, a, row, *, by=1.0):\n    return -by\n")
        assert scored() == [1.0]
        rewards.reload("reward", {"by": 3.0})
        path.unlink()
        assert scored() == [-3.0]
        groups["reward"].close()
        groups["reward"] = Lost()
        with pytest.raises(ValueError, match="'reward' is unchanged; its workers were started"):
            rewards.reload("reward", {"by": 5.0})
        assert groups["reward"].run(RewardWorker.score, batch)["rewards"].tolist() == [-3.0]


def test_two_nodes_that_lose_one_worker_start_it_anew_once(make_recipe):
    """ReMax scores samples and greedy responses by one role, beside each other."""
    both, started = threading.Barrier(2), []

    class Lost:
        def run(self, *args, **named):
            both.wait(30)
            raise WorkerDied("reward", 0, "score", "its process has ended", "", "")

    class New:
        def wait_until_started(self):
            started.append(self)
            return self

        def run(self, *args, **named):
            return "scores"

    rewards = Scoring(compile_recipe(make_recipe()), {"reward": Lost()}, lambda *told: New())
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(rewards.score, "reward", None, 1.0) for _ in range(2)]
    assert [call.result()[0] for call in calls] == ["scores"] * 2 and len(started) == 1


def test_the_deadline_of_a_score_is_of_all_nodes_that_may_wait_for_it():
    """Workers serve the nodes of their role one after the other."""
    plan = compile_recipe(load_recipe(ROOT / "recipes" / "quickstart_remax.yaml"))
    graph, seen = plan.stages[-1].graph, []
    team, result = object.__new__(Team), Batch({}, {}, 1, 1)
    team.groups = {"reward": None}
    team.rewards = Scoring(plan, team.groups, lambda *told: None)
    team.rewards.score = lambda role, batch, seconds: (seen.append(seconds), (result, ""))[1]
    around = Surroundings(plan.recipe, plan.stages[-1], team, lambda context: "", lambda k, t: None)
    nodes = [node for node in graph.nodes if node.call == "score"]
    CALLS["reward", "score"](nodes[0], around, result, StepContext("main", 1, 1, 1))
    assert len(nodes) == 3 and seen == [3 * 60.0 + SCORE_GRACE_SECONDS]


def judge_of(quickstart: Path, folder: Path, seed: int, scale: float = 1.0) -> Path:
    """A reward model of the quickstart's shape and tokenizer, of random weights."""
    config = Qwen3Config.from_pretrained(quickstart, num_labels=1, pad_token_id=0)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data.mul_(scale)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(quickstart).save_pretrained(folder)
    return folder


@transfer(GATHER)
def try_pretrained(self: ModelWorker, folder: str) -> str:
    """In the place of ``ModelWorker``'s: this rank has read all, and another one cannot."""
    self.load_pretrained(folder)
    return "rank 1: input/output error"


def test_a_reward_model_in_megatron_is_swapped_or_stays(quickstart, tmp_path, monkeypatch):
    one, two = (judge_of(quickstart, tmp_path / f"judge{seed}", seed) for seed in (5, 6))
    broken = tmp_path / "broken"
    shutil.copytree(two, broken)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    diverged = judge_of(quickstart, tmp_path / "diverged", 7, scale=math.nan)
    rows = {"prompts": Ragged.from_rows([[3, 4, 5]]), "responses": Ragged.from_rows([[6, 7], [8]])}
    axes = {"prompts": Axis.PROMPTS, "responses": Axis.TOKENS}
    batch = Batch(rows, axes, 1, 2)
    with LocalSession() as session:

        def scorer(name: str, folder: Path):
            engine = EngineConfig(str(folder), ParallelLayout(), head="value")
            return session.group(name, ModelWorker, ParallelLayout(), None, {"engine": engine})

        def scores(group) -> list[float]:
            return group.run(ModelWorker.score, batch)["rewards"].tolist()

        group, other = scorer("reward", one), scorer("other", two)
        first, second = scores(group), scores(other)
        assert first != second
        for folder in (broken, tmp_path / "absent", quickstart, diverged):
            with pytest.raises(ValueError, match="reward role 'reward' is unchanged: "):
                swap_model(group, "reward", {"model": str(folder)}, str(one))
            assert scores(group) == first
        with monkeypatch.context() as patch:
            patch.setattr(ModelWorker, "try_pretrained", try_pretrained)
            with pytest.raises(ValueError, match="unchanged: rank 1: input/output error"):
                swap_model(group, "reward", {"model": str(two)}, str(one))
        assert scores(group) == first, "weights that were read already are put back"
        with pytest.raises(ValueError, match="takes {'model': FOLDER}, not {'scale': 2}"):
            swap_model(group, "reward", {"scale": 2}, str(one))
        told = swap_model(group, "reward", {"model": str(two)}, str(one))
        assert told == {"reward": {"model": str(two)}} and scores(group) == second


class Swaps(SerialRunner):
    """Asks for another reward model during the first step."""

    def __init__(self, teams, model: Path):
        self._teams, self._model = teams, model

    def run(self, graph, nodes, run_node):
        super().run(graph, nodes, run_node)
        team = self._teams[-1]
        if not team.rewards.parameters:
            work = partial(team.rewards.reload, "reward", {"model": str(self._model)})
            team.between.ask("reward", Errand("a swap", work))


@pytest.mark.slow
def test_a_reward_model_in_megatron_scores_a_run(
    make_recipe, recipe_file, quickstart, tmp_path, monkeypatch
):
    """Swapped after the first step, as the resumed run goes on with."""
    judge, other = (judge_of(quickstart, tmp_path / f"judge{seed}", seed) for seed in (5, 6))
    teams, begin = [], Team.__init__

    def remember(self, *args):
        begin(self, *args)
        teams.append(self)

    monkeypatch.setattr(Team, "__init__", remember)
    recipe = yaml.safe_load(recipe_file.read_text())
    recipe |= {"steps": 2, "warm_start": None}
    recipe["roles"]["reward"] = {"head": "value", "model": str(judge), "colocate": "actor"}
    recipe_file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    rows = list(read_metrics(run(make_recipe(), Swaps(teams, other))))
    assert len(rows) == 2 and all(row["metrics"]["reward/std"] > 0 for row in rows)
    assert "eval/reward" in rows[-1]["metrics"]
    assert teams[0].rewards.model_of("reward") == str(other)
    folder = run(make_recipe("steps=3"), resume=True)
    assert teams[1].rewards.model_of("reward") == str(other)
    events = [event["text"] for event in read_events(folder) if event["kind"] == "reload"]
    assert events[0] == "a swap: done" and f'"model": "{other}"' in events[1]
