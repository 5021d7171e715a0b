"""Options of functions and parameters of rewards: bounds, forms, nothing that is not finite."""

import math
from pathlib import Path

import pytest

from hybridflow.recipe.catalogue import CALLS, FUNCTIONS, REWARDS
from hybridflow.recipe.checks import check_file
from hybridflow.recipe.signature import Option

ROOT = Path(__file__).parents[2]
SIGNATURES = [*CALLS.values(), *FUNCTIONS.values()]
OPTIONS = [option for known in SIGNATURES for option in known.options.values()]
OPTIONS += [option for entry in REWARDS.values() for option in entry.parameters.values()]
ANY_NUMBER = {"reward above which a response is good"}
"""Of an option that has no bound but to be finite."""


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", overrides)[1]]


def test_no_option_takes_what_is_not_finite() -> None:
    for option in OPTIONS:
        if "float" in option.dtype:
            for number in (math.nan, math.inf, -math.inf):
                value = [1.0, number] if "list" in option.dtype else number
                assert "must be finite" in str(option.problem(value)), option


def test_numbers_have_bounds() -> None:
    """A new option says what its value may be."""
    for option in OPTIONS:
        bounded = option.rule is not None or option.description in ANY_NUMBER
        assert bounded or option.dtype not in ("int", "float"), option
        assert option.problem(option.default) is None or option.required


FUNCTION = [
    ("reinforce_pp", "function: reinforce_pp,", "gamma: -7.0", "must be more than 0 and at most 1"),
    ("reinforce_pp", "function: reinforce_pp,", "gamma: .nan", "`gamma` of node 'advantage' must"),
    ("prime", "function: prime,", "gamma: 1e30", "more than 0 and at most 1, not 1e+30"),
    ("prime", "function: outcome_labels,", "above: .inf", "must be finite, not inf"),
    ("dapo", "function: soft_overlong,", "factor: -3.0", "must be more than 0, not -3.0"),
    ("gdpo", "function: gdpo,", "weights: [0, 0.0]", "weights that are not all 0"),
    ("gdpo", "function: gdpo,", "weights: [1, .nan]", "must be finite"),
    ("distill", "function: reverse_kl,", "scale: 0", "must be more than 0, not 0"),
    ("grpo_shuffled", "function: shuffle,", "seed: 2147483648", "at most 2147483647"),
    ("ppo", "function: token_rewards,", "kl_share: 7", "between -1 and 1, not 7"),
]


@pytest.mark.parametrize(("flow", "node", "told", "what"), FUNCTION)
def test_options_of_functions(workspace: Path, flow: str, node: str, told: str, what: str) -> None:
    graph = (ROOT / f"recipes/dataflows/{flow}.yaml").read_text()
    assert graph.count(node) == 1
    Path("flow.yaml").write_text(graph.replace(node, f"{node} {told},"))
    found = [fault for fault in faults_of("dataflow=flow.yaml") if what in fault]
    assert len(found) == 1 and found[0].startswith("flow.yaml:"), faults_of("dataflow=flow.yaml")


REWARD = [
    ("{_target_: http, url: 'ftp://x'}", "`roles.reward.parameters.url` must be http://HOST"),
    ("{_target_: http, url: 'http://h:99999/x'}", "Port out of range"),
    ("{_target_: http, url: 'http://me:word@h/x'}", "name the variable of a token by `token_env`"),
    ("{_target_: http, url: 'http://h', batch: 0}", "must be 1 or more, not 0"),
    ("{_target_: http, url: 'http://h', token_env: 'a b'}", "must be a variable's name"),
    ("{_target_: http, url: 'http://h', headers: {a: 3}}", "mapping of names to texts"),
    ("{_target_: json_schema, schema: {type: 5}}", "$.type 5 is not valid under any"),
    ("{_target_: json_schema, tag: ' '}", "must be a text with a letter or more"),
    ("{_target_: reward_model, path: absent}", "there is no such folder"),
    ("{_target_: reward_model, path: .}", "it holds no config.json"),
    ("{_target_: number_match, tolerance: .nan}", "must be finite"),
]


@pytest.mark.parametrize(("role", "what"), REWARD)
def test_parameters_of_rewards(workspace: Path, role: str, what: str) -> None:
    (found,) = faults_of(f"roles.reward={role}")
    assert what in found and found.startswith("command line: `roles.reward.parameters."), found
    assert "Fix: " in found


def test_a_reward_that_is_told_right(workspace: Path) -> None:
    told = "url: 'http://[::1]:80/x?y', headers: {X-Who: me}, token_env: _T, timeout_seconds: 1"
    assert faults_of(f"roles.reward={{function: http, parameters: {{{told}}}}}") == []
    assert faults_of("roles.reward={_target_: json_schema, schema: {type: object}}") == []
    Path("scorer").mkdir()
    Path("scorer/config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    assert faults_of("roles.reward={_target_: reward_model, path: scorer, label: 0}") == []


def test_null_stands_for_a_default_of_none() -> None:
    assert Option("int").problem(None) is None and Option("int", 1).problem(None) is not None
