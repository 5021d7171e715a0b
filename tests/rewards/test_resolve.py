"""From a name in a recipe to a function with checked parameters."""

import json

import pytest

from hybridflow.recipe import catalogue
from hybridflow.rewards import REWARDS, importable, resolve

SOURCE = """
LIMIT = 3

def shorter(prompt, response, answer, row, limit=LIMIT, *, weight):
    return weight * (len(response) <= limit)

def anything(*args, **kwargs):
    return len(args) + len(kwargs)

def too_few(prompt, response):
    return 1.0

async def later(prompt, response, answer, row):
    return 1.0

class Judge:
    batch = 7

    def __init__(self, scale=1.0):
        self.scale = scale

    def score(self, items):
        return [self.scale] * len(items)

class Called:
    async def __call__(self, prompt, response, answer, row):
        return 2.0

class Neither:
    pass

class Greedy(Judge):
    batch = 0
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my-rewards.py"
    path.write_text(SOURCE)
    return path


def test_registered_name_with_parameters():
    assert resolve("exact_match").call("p", " 1", "1", {}) == 1.0
    assert resolve("exact_match", {"strip": False}).call("p", " 1", "1", {}) == 0.0


def test_a_file_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_my_reward.py").write_text("WORTH = 0.25\n")
    path = tmp_path / "mine.py"
    path.write_text("from beside_my_reward import WORTH\ndef fn(p, r, a, row):\n    return WORTH\n")
    assert resolve(f"{path}:fn").call("p", "r", "a", {}) == 0.25


def test_function_of_a_file_absolute_and_relative(file):
    function = resolve(f"{file}:shorter", {"weight": 0.5})
    assert function.call("p", "abc", None, {}) == 0.5
    relative = resolve("my-rewards.py:shorter", {"weight": 2, "limit": 1}, base=file.parent)
    assert relative.call("p", "abc", None, {}) == 0
    assert relative.name == "my-rewards.py:shorter"


def test_function_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_a_user.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("rewards_of_a_user.anything", {"a": 1, "b": 2}).call("p", "r", "a", {}) == 6


def test_classes_and_async_functions_are_known_for_what_they_are(file):
    def of(name, **parameters):
        return resolve(f"{file}:{name}", parameters)

    assert of("later").is_async and not of("later").takes_batch
    judge = of("Judge", scale=0.5)
    assert (judge.takes_batch, judge.batch, judge.is_async) == (True, 7, False)
    assert judge.call([1, 2]) == [0.5, 0.5]
    assert of("Called").is_async and not of("Called").takes_batch


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("exact_mach", {}, "unknown reward 'exact_mach'; did you mean 'exact_match'"),
        ("exact_match", {"stripp": 1}, "unknown parameter 'stripp'; did you mean 'strip'"),
        ("format_regex", {}, "'pattern' has no value"),
        ("length", {"slac": 1}, "unknown parameter 'slac'.*'budget' has no value"),
        ("exact_match", {"prompt": "x"}, "unknown parameter 'prompt'"),
        ("no.such.module.fn", {}, "module 'no.such.module' cannot be imported"),
        ("missing.py:fn", {}, "there is no Python file"),
        ("my-rewards.py:shorte", {}, "has no 'shorte'; did you mean 'shorter'"),
        ("my-rewards.py:LIMIT", {}, "is no function"),
        ("my-rewards.py:Judge", {"scal": 1}, "unknown parameter 'scal'; did you mean 'scale'"),
        ("my-rewards.py:Neither", {}, r"neither `score\(items\)` nor `__call__"),
        ("my-rewards.py:Greedy", {}, "batch must be 1 or more, not 0"),
        ("my-rewards.py:too_few", {}, r"takes 2 arguments.*\(prompt, response, answer, row\)"),
        ("my-rewards.py:shorter", {"weigth": 1}, "did you mean 'weight'.*'weight' has no value"),
    ],
)
def test_mistakes_are_named(file, name, parameters, message):
    with pytest.raises(ValueError, match=message):
        resolve(name, parameters, base=file.parent)


def test_a_file_that_fails_names_its_error(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(ValueError, match="fails when run.*nothing_of_this_name"):
        resolve("broken.py:fn", base=tmp_path)


def test_a_reward_registered_from_python_is_found_by_its_path_elsewhere(monkeypatch):
    for registry in (REWARDS, catalogue.REWARDS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    REWARDS.register("mine", json.JSONDecoder)
    assert importable("mine") == "json.decoder.JSONDecoder"
    assert catalogue.REWARDS["mine"].from_python, "the checks of recipes know it"
    for name in ("exact_match", "math_verify", "pkg.mod.fn", "file.py:fn"):
        assert importable(name) == name
