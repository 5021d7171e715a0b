"""The torch-free catalogue and the code name the same functions, losses and estimators."""

import inspect
from typing import Any

import pytest

from hybridflow.algorithms import AGGREGATIONS, ESTIMATORS, FUNCTIONS, LOSSES, PREFERENCES
from hybridflow.recipe import catalogue, schema_algorithm
from hybridflow.recipe.registry import Registry, UnknownName


def test_functions_and_their_options():
    assert FUNCTIONS.keys() == catalogue.FUNCTIONS.keys()
    for name, function in FUNCTIONS.items():
        options = list(inspect.signature(function).parameters)[2:]
        assert options == list(catalogue.FUNCTIONS[name].options), name


def test_losses_and_what_they_need():
    assert LOSSES.keys() | PREFERENCES.keys() == catalogue.LOSSES.keys()
    for name, loss in LOSSES.items():
        assert loss.needs_advantages == ("advantages" in catalogue.LOSSES[name].needs), name


def test_bounds_where_a_recipe_tells_none_are_the_papers():
    told = {
        "gspo": (3e-4, 4e-4),  # arXiv:2507.18071
        "gspo_token": (3e-4, 4e-4),
        "gmpo": (0.4, 0.4),  # arXiv:2507.20673: of logarithms
        "cispo": (1.0, 0.2),  # arXiv:2506.13585 has none below
    }
    clip = {name for name, entry in catalogue.LOSSES.items() if "clip" in entry.settings}
    assert clip > told.keys()
    for name in clip:
        assert catalogue.LOSSES[name].clip == told.get(name, (0.2, 0.2)), name


def test_choices_of_the_recipe():
    fields = schema_algorithm.AlgorithmSection.model_fields
    assert set(fields["aggregation"].annotation.__args__) == set(AGGREGATIONS)
    assert set(AGGREGATIONS) == set(catalogue.AGGREGATIONS)
    estimators = schema_algorithm.KlSection.model_fields["estimator"].annotation
    assert set(estimators.__args__) == {*ESTIMATORS, "full"}, "full is no estimate from samples"
    assert set(estimators.__args__) == set(catalogue.KL_ESTIMATORS)


@pytest.mark.parametrize("registry", [AGGREGATIONS, ESTIMATORS], ids=lambda registry: registry.kind)
def test_averages_and_estimators_are_found_by_any_name(registry: Registry[Any]):
    for alias, name in registry.aliases.items():
        assert registry[alias] is registry[name]
    name = next(iter(registry))
    with pytest.raises(UnknownName, match=f"unknown {registry.kind} '{name}s'; .*'{name}'"):
        registry[f"{name}s"]
    with pytest.raises(ValueError, match=f"'{name}' is registered twice"):
        registry.register(name, registry[name])


def test_a_recipe_may_name_an_average_or_estimator_by_an_alias():
    kl = schema_algorithm.KlSection.model_validate({"estimator": "low_var_kl"})
    assert kl.estimator == "k3"
    algorithm = schema_algorithm.AlgorithmSection.model_validate({"aggregation": "token-mean"})
    assert algorithm.aggregation == "token_mean"
    with pytest.raises(ValueError, match="is no aggregation: 'tokenmean'"):
        schema_algorithm.AlgorithmSection.model_validate({"aggregation": "tokenmean"})
