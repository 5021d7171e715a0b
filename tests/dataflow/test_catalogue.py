"""The torch-free catalogue and the code say the same."""

import inspect

from hybridflow.algorithms import FUNCTIONS, LOSSES, PREFERENCES
from hybridflow.dataflow.operations import CALLS
from hybridflow.recipe import catalogue
from hybridflow.rewards import REWARDS


def test_every_call_has_an_operation() -> None:
    assert set(CALLS) == set(catalogue.CALLS)


def test_functions_and_their_options() -> None:
    assert set(FUNCTIONS) == set(catalogue.FUNCTIONS)
    for name, function in FUNCTIONS.items():
        options = list(inspect.signature(function).parameters)[2:]
        assert options == list(catalogue.FUNCTIONS[name].options), name


def test_losses() -> None:
    assert {*LOSSES, *PREFERENCES} == set(catalogue.LOSSES)


def test_rewards_and_their_parameters() -> None:
    assert set(REWARDS) == set(catalogue.REWARDS)
    for name, function in REWARDS.items():
        given = 0 if inspect.isclass(function) else 4
        parameters = list(inspect.signature(function).parameters)[given:]
        assert parameters == list(catalogue.REWARDS[name].parameters), name
