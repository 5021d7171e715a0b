"""A loss and a function of the user's own: what `imports` does, and what is wrong with them."""

import re
from pathlib import Path

import pytest
import torch

from hybridflow.algorithms import FUNCTIONS, LOSSES, FunctionContext
from hybridflow.algorithms.losses import Sequences, TokenInputs
from hybridflow.batch import Batch
from hybridflow.recipe import catalogue
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.checks import check_file
from hybridflow.recipe.own_code import OwnModule
from hybridflow.rewards import REWARDS, importable, resolve
from tests.own_names import guide_code

pytestmark = pytest.mark.usefixtures("own_names")

GRAPH = """inputs: [prompts, answers]
nodes:
  generate: {role: rollout, call: generate, in: [prompts], out: [responses]}
  score: {role: reward, call: score, in: [prompts, answers, responses], out: [rewards]}
  old: {role: actor, call: logprobs, in: [prompts, responses], out: [{logprobs: old_logprobs}]}
"""
PUBLISH = "  publish: {role: actor, call: publish, to: rollout, after: [update]}\n"
TOLD = [
    *("roles.reference=null", "algorithm={}", "checkpoint={}", "evaluation=null"),
    *("imports=[my_algorithm.py]", "dataflow=my_graph.yaml"),
]
FROM = """
from hybridflow.algorithms import register_function, register_loss
from hybridflow.algorithms.losses import TokenLoss
from hybridflow.recipe.catalogue_fields import ADVANTAGES, REWARD_VALUES, takes
from hybridflow.recipe.catalogue_losses import LossEntry
from hybridflow.recipe.signature import Option, Signature
"""


@pytest.fixture
def guide(workspace: Path) -> Path:
    """The guide's module and graph beside a recipe that is otherwise sound."""
    (workspace / "my_algorithm.py").write_text(guide_code("python")[0])
    (workspace / "my_graph.yaml").write_text(GRAPH + guide_code("yaml")[1] + PUBLISH)
    return workspace


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", [*TOLD, *overrides])[1]]


def test_the_guides_loss_and_function_are_checked_like_those_that_ship(guide: Path) -> None:
    assert faults_of("algorithm.clip=0.1") == []
    (fault,) = faults_of("roles.actor.mini_batches=2")
    assert "lacks `old_logprobs`" in fault and "'update'" in fault, "the loss compares policies"
    (fault,) = faults_of("data.samples_per_prompt=1")
    assert "'advantage' compares samples" in fault
    (fault,) = faults_of("algorithm.dual_clip=2.0")
    assert "algorithm.dual_clip does nothing" in fault
    text = (guide / "my_graph.yaml").read_text()
    (guide / "my_graph.yaml").write_text(
        text.replace("2.0}", "0}").replace("loss: spo", "loss: sp")
    )
    found = faults_of()
    assert any("`scale` of node 'advantage' must be more than 0" in fault for fault in found)
    assert any("did you mean 'spo'?" in fault for fault in found)


def test_the_guides_loss_and_function_do_what_they_say(guide: Path) -> None:
    assert faults_of() == []
    batch = Batch({"rewards": torch.tensor([0.0, 1.0, 5.0])}, {"rewards": Axis.SAMPLES}, 1, 3)
    given = FUNCTIONS["minus_median"](batch, FunctionContext(), scale=2.0)
    assert given["advantages"].tolist() == [-2.0, 0.0, 8.0]
    logprobs_T = torch.tensor([0.1, -0.3], requires_grad=True)
    sequences = Sequences(torch.tensor([0, 0]), torch.tensor([2]))
    advantages_T = torch.tensor([2.0, -1.0])
    inputs = TokenInputs(logprobs_T, torch.zeros(2), advantages_T, sequences=sequences)
    result = LOSSES["spo"](inputs)
    ratio_T = logprobs_T.detach().exp()
    wanted_T = advantages_T.abs() / 0.4 * (ratio_T - 1) ** 2 - ratio_T * advantages_T
    torch.testing.assert_close(result.loss_T.detach(), wanted_T)
    assert LOSSES["spo"].metrics == ("ratio_mean",)
    assert LOSSES["spo"].needs_advantages and LOSSES["spo"].compares_policies


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_of_this_name", "my_algorithm.py:7 fails when run: ModuleNotFoundError"),
        ("1 +", "my_algorithm.py fails when run: SyntaxError"),
        ("register_loss('dpo', LossEntry('x'))(lambda i: TokenLoss(i.logprobs_T))", "twice"),
        ("register_loss('m', LossEntry('x', samples=2))", "is of tokens"),
        (
            "register_loss('m', LossEntry('x'))(lambda i: TokenLoss(i.logprobs_T.detach()))",
            "the loss 'm' fails on four tokens: .*detached",
        ),
        (
            "register_loss('m', LossEntry('x'))(lambda i: TokenLoss(i.logprobs_T.mean()))",
            r"the shape \[4\] and the loss \[\]",
        ),
        (
            "register_loss('m', LossEntry('x'))(lambda i: i.logprobs_T)",
            "fails on four tokens: AttributeError",
        ),
        (
            "register_function('m', Signature('x'))(lambda batch, context, scale=1: {})",
            r"then \['scale'\], and its signature has the options \[\]",
        ),
    ],
)
def test_what_cannot_be_imported_is_one_fault(guide: Path, code: str, message: str) -> None:
    (guide / "my_algorithm.py").write_text(FROM + code)
    (fault,) = faults_of()
    assert re.search(message, fault), fault
    assert fault.startswith("command line: "), "names that are missing now are no further faults"
    assert {"m", "spo"}.isdisjoint(catalogue.LOSSES) and {"m", "spo"}.isdisjoint(LOSSES)


def test_what_is_no_module(guide: Path) -> None:
    assert "cannot read" in faults_of("imports=[nowhere.py]")[0]
    assert "the module 'no.such_module' cannot be" in faults_of("imports=[no.such_module]")[0]
    assert "must name a module" in faults_of("imports=['rm -rf /']")[0]
    assert "must name a module" in faults_of("imports=[3]")[0]
    text = (guide / "recipe.yaml").read_text() + "imports:\n- my_algorithm.py\n- nowhere.py\n"
    (guide / "recipe.yaml").write_text(text)
    (fault,) = check_file("recipe.yaml", [told for told in TOLD if "imports" not in told])[1]
    assert fault.where == f"recipe.yaml:{len(text.splitlines())}"


def test_an_installed_module_and_a_reward(guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(guide))
    text = (guide / "my_algorithm.py").read_text()
    more = "\nfrom hybridflow.rewards import REWARDS\n"
    more += "def odd(prompt, response, answer, row): return float(len(response) % 2)\n"
    (guide / "own_algorithm.py").write_text(text + more + "REWARDS.register('odd', odd)\n")
    assert faults_of("imports=[own_algorithm]", "roles.reward.function=odd") == []
    assert importable("odd") == "own_algorithm.odd"


def test_a_reward_of_a_file_is_found_by_other_processes(guide: Path) -> None:
    code = "from hybridflow.rewards import REWARDS\n"
    code += "def odd(prompt, response, answer, row): return float(len(response) % 2)\n"
    (guide / "my_rewards.py").write_text(code + "REWARDS.register('odd', odd)\n")
    told = ["imports=[my_algorithm.py, my_rewards.py]", "roles.reward.function=odd"]
    assert faults_of(*told) == []
    place = importable("odd")
    assert place == f"{guide / 'my_rewards.py'}:odd"
    del REWARDS._entries["odd"], catalogue.REWARDS._entries["odd"]  # as in another process
    assert resolve(place).call("", "abc", "", {}) == 1.0


def test_ranks_run_what_the_file_held_at_the_start(guide: Path) -> None:
    """A rank of another host has no such file, or one that was changed since."""
    module = OwnModule.of("my_algorithm.py")
    (guide / "my_algorithm.py").unlink()
    module.load()
    assert "spo" in LOSSES
    module.load()  # a rank of the same process
