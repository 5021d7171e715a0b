"""The rewards that ship with the package, and the catalogue that describes them."""

import inspect

import pytest

from hybridflow.recipe.catalogue import REWARDS as CATALOGUE
from hybridflow.rewards import REWARDS
from hybridflow.rewards.json_schema import JsonSchema
from hybridflow.rewards.number_match import last_number


def score(name: str, response: str, answer: object = "", row: dict | None = None, **parameters):
    return REWARDS[name]("prompt", response, answer, row or {}, **parameters)


def test_catalogue_describes_every_reward_and_its_parameters():
    assert set(CATALOGUE) == set(REWARDS)
    for name, entry in CATALOGUE.items():
        given = 0 if inspect.isclass(REWARDS[name]) else 4
        declared = list(inspect.signature(REWARDS[name]).parameters.values())[given:]
        assert {p.name for p in declared} == set(entry.parameters), name
        for parameter in declared:
            option = entry.parameters[parameter.name]
            assert option.required == (parameter.default is parameter.empty), parameter
            if not option.required:
                assert option.default == parameter.default, parameter


def test_exact_match_ignores_white_space_around_unless_told():
    assert score("exact_match", " 092\n", "092") == 1.0
    assert score("exact_match", "92", "092") == 0.0
    assert score("exact_match", "7", 7) == 1.0
    assert score("exact_match", " 092", "092", strip=False) == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 1,234.50.", "1234.50"),
        ("12 - 5 = -7", "-7"),
        ("7-3", "3"),
        ("x is -3", "-3"),
        ("#### 42", "42"),
        (".5", "0.5"),
        ("between 1, 2 and 3.", "3"),
        ("1,23", "23"),
        ("nothing", None),
        ("so \N{MINUS SIGN}5", "-5"),
        ("7\N{MINUS SIGN}3", "3"),
        ("1.5e3", "1.5E+3"),
        ("2e-2.", "0.02"),
        ("1e9999999", "9999999"),
    ],
)
def test_last_number(text, number):
    found = last_number(text)
    assert (str(found) if found is not None else None) == number


def test_number_match_compares_values_not_spelling():
    assert score("number_match", "That makes 42.0", "#### 42") == 1.0
    assert score("number_match", "41 or 42, no: 41", 42) == 0.0
    assert score("number_match", "no idea", 42) == 0.0
    assert score("number_match", "1e3", "1000") == 1.0
    assert score("number_match", "\N{MINUS SIGN}5", "5") == 0.0
    assert score("number_match", "3.14", "3.14159", tolerance=0.01) == 1.0
    with pytest.raises(ValueError, match="holds no number"):
        score("number_match", "3", "three")


def test_format_regex_must_match_the_whole_response():
    pattern = r"<think>.*</think>\s*\d+"
    assert score("format_regex", "<think>a\nb</think> 12\n", pattern=pattern) == 1.0
    assert score("format_regex", "12 <think></think>", pattern=pattern) == 0.0
    with pytest.raises(ValueError, match="no regular expression"):
        score("format_regex", "x", pattern="(")


def test_length_falls_in_a_line_after_the_budget():
    assert score("length", "x" * 100, budget=100) == 1.0
    assert score("length", "x" * 101, budget=100) == 0.0
    assert score("length", "x" * 125, budget=100, slack=50) == 0.5
    assert score("length", "x" * 900, budget=100, slack=50) == 0.0
    with pytest.raises(ValueError, match="budget > 0"):
        score("length", "x", budget=0)


def test_reasoning_gym_uses_the_scorer_of_the_rows_task():
    pytest.importorskip("reasoning_gym")
    row = {"metadata": {"source_dataset": "chain_sum"}}
    assert score("reasoning_gym", " 12\n", "12", row) == 1.0
    assert score("reasoning_gym", "so 12", "12", row) == pytest.approx(2 / 5)
    assert score("reasoning_gym", "<answer>3</answer> <answer>12</answer>", "12", row, tag="answer")
    assert score("reasoning_gym", "12", "12", row, tag="answer") == 0.0


def test_reasoning_gym_says_what_the_row_lacks():
    with pytest.raises(ValueError, match="hybridflow make reasoning-gym"):
        score("reasoning_gym", "12", "12", {"answer": "12"})
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="no task 'chain_sums'; did you mean 'chain_sum'"):
        score("reasoning_gym", "12", "12", {"metadata": {"source_dataset": "chain_sums"}})


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("1/2", r"so it is $\frac{1}{2}$", 1.0),
        (r"\frac{1}{2}", "I get 0.5", 1.0),
        (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", 1.0),
        (r"3\sqrt{2}", r"\boxed{3}", 0.0),
        ("x^2+1", "$1 + x^2$", 1.0),
        ("{1, 2, 3}", r"$\{3, 1, 2\}$", 1.0),
        ("[0, 1)", "$(0, 1)$", 0.0),
        ("72", "#### 72", 1.0),
        (42, "no idea", 0.0),
        ("7", r"\boxed{7}, not 8", 1.0),
        ("east", r"\boxed{seat}", 0.0),
        ("east", r"It lies \boxed{\text{East}}.", 1.0),
        (r"\text{Paris}", "Paris.", 1.0),
        ("A", "(A)", 1.0),
        ("A", r"not B, but \boxed{\mathrm{A}}", 1.0),
        ("A", r"\boxed{B}", 0.0),
        ("n", "$n$", 1.0),
    ],
)
def test_math_compares_expressions(answer, response, reward):
    assert score("math", response, answer) == reward


def test_math_reads_within_a_tag_and_refuses_answers_without_an_expression():
    assert score("math", "<a>1</a> <a>2</a> 3", "2", tag="a") == 1.0
    assert score("math", "2", "2", tag="a") == 0.0
    with pytest.raises(ValueError, match="holds no expression"):
        score("math", "2", "")


POINT = {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (' {"x": 3}\n', 1.0),
        ('{"x": 3, "y": [1]}', 1.0),
        ('{"x": "3"}', 0.0),
        ("{}", 0.0),
        ('{"x": 3} and more', 0.0),
        ('{"x": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("[" * 900 + "]" * 900, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema_takes_what_the_schema_allows(response, reward):
    assert JsonSchema(schema=POINT)("p", response, "", {}) == reward


def test_json_schema_of_the_row_and_within_a_tag():
    assert JsonSchema()("p", "3", '{"type": "integer"}', {}) == 1.0
    assert JsonSchema()("p", '"3"', '{"type": "integer"}', {}) == 0.0
    tagged = JsonSchema(schema=POINT, tag="json")
    assert tagged("p", 'Here: <json>{"x": 1}</json>', "", {}) == 1.0
    assert tagged("p", '{"x": 1}', "", {}) == 0.0
    with pytest.raises(ValueError, match="is no JSON"):
        JsonSchema()("p", "3", "integer", {})


def test_json_schema_refuses_schemas_that_are_none_and_fetches_nothing():
    with pytest.raises(ValueError, match="the schema is not valid"):
        JsonSchema(schema={"type": "integr"})
    remote = JsonSchema(schema={"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(Exception, match="Unresolvable"):
        remote("p", "3", "", {})
