"""The torch-free catalogue and the code name the same functions, losses and estimators."""

import inspect

from hybridflow.algorithms import AGGREGATIONS, ESTIMATORS, FUNCTIONS, LOSSES, PREFERENCES
from hybridflow.recipe import catalogue, schema


def test_functions_and_their_options():
    assert FUNCTIONS.keys() == catalogue.FUNCTIONS.keys()
    for name, function in FUNCTIONS.items():
        options = list(inspect.signature(function).parameters)[2:]
        assert options == list(catalogue.FUNCTIONS[name].options), name


def test_losses_and_what_they_need():
    assert LOSSES.keys() | PREFERENCES.keys() == catalogue.LOSSES.keys()
    for name, loss in LOSSES.items():
        assert loss.needs_advantages == ("advantages" in catalogue.LOSSES[name].needs), name


def test_choices_of_the_recipe():
    fields = schema.AlgorithmSection.model_fields
    assert set(fields["aggregation"].annotation.__args__) == set(AGGREGATIONS)
    estimators = schema.KlSection.model_fields["estimator"].annotation
    assert set(estimators.__args__) == {*ESTIMATORS, "full"}, "full is no estimate from samples"
