"""Reading recipes: YAML 1.2, origins, overrides, faults of form."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.faults import RecipeError
from hybridflow.recipe.load import load_recipe, read_draft, resolved_yaml
from hybridflow.recipe.source import parse_yaml, to_yaml


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "y", "N", "On", "YES", "12:30", "1_0"])
def test_words_of_yaml_1_1_are_texts(word: str):
    assert parse_yaml(f"key: {word}", "f").data == {"key": word}


def test_values_follow_yaml_1_2():
    text = "{a: 1e-6, b: no, c: 010, d: .5, e: 1_000, f: ~, g: 'x', h: 0x10, i: True, j: 12:30}"
    assert parse_yaml(text, "f").data == {
        "a": 1e-6,
        "b": "no",
        "c": 10,
        "d": 0.5,
        "e": "1_000",
        "f": None,
        "g": "x",
        "h": 16,
        "i": True,
        "j": "12:30",
    }


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("aeno1-.:_ x"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(plain)
def test_what_is_written_reads_back(value):
    source = parse_yaml(to_yaml(value), "f")
    assert source.faults == []
    assert source.data == value
    assert type(source.data) is type(value)


def test_aliases_and_tags_cannot_harm():
    endless = parse_yaml("a: &a [*a]", "f")
    assert "alias" in str(endless.faults[0])
    tagged = parse_yaml("a: !!python/object/apply:os.system [ls]\nb: !x 1", "f")
    assert "not allowed" in str(tagged.faults[0])
    bomb = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{new}: &{new} [{','.join(['*' + old] * 10)}]\n"
        for old, new in zip("abcde", "bcdef", strict=True)
    )
    assert "alias" in str(parse_yaml(bomb, "f").faults[0])


def test_origins_name_file_and_line(workspace: Path):
    recipe = load_recipe("recipe.yaml", ["roles.actor.parallel.dp=1", "algorithm.clip=[0.1, 0.3]"])
    assert recipe.origin("data.train") == "recipe.yaml:5"
    assert recipe.origin("data.shuffle") == "recipe.yaml:4"
    assert recipe.origin("seed") == "recipe.yaml"
    assert recipe.origin("roles.actor.parallel.dp") == "command line"
    assert recipe.algorithm.clip_bounds((0.2, 0.2)) == (0.1, 0.3)


@settings(max_examples=15, deadline=None)
@given(
    lr=st.floats(1e-9, 1.0, exclude_min=True),
    seed=st.integers(0, 2**31 - 1),
    shuffle=st.booleans(),
    name=st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True),
)
def test_overrides_are_what_a_file_would_say(tmp_path_factory, lr, seed, shuffle, name):
    from .conftest import RECIPE

    path = tmp_path_factory.getbasetemp() / "override.yaml"
    path.write_text(RECIPE)
    name_text = to_yaml(name).removesuffix("...\n").strip()
    overrides = [
        *(f"roles.actor.optimizer.lr={lr!r}", f"seed={seed}"),
        *(f"data.shuffle={str(shuffle).lower()}", f"name={name_text}"),
    ]
    recipe = load_recipe(path, overrides)
    assert recipe.roles.actor.optimizer.lr == lr
    assert (recipe.seed, recipe.data.shuffle, recipe.name) == (seed, shuffle, name)
    again = path.with_name("again.yaml")
    again.write_text(resolved_yaml(recipe))
    assert load_recipe(again) == recipe


def test_a_written_recipe_holds_the_graphs_of_files(workspace: Path):
    """Which may change, or go, while the run goes on."""
    for name in ("grpo", "sft"):
        shutil.copy(SHIPPED / f"{name}.yaml", f"{name}.yaml")
    warm = "warm_start={steps: 2, prompts_per_step: 4, lr: 1, dataflow: sft.yaml}"
    recipe = load_recipe("recipe.yaml", ["dataflow=grpo.yaml", warm])
    stages = compile_recipe(recipe).stages
    Path("written.yaml").write_text(resolved_yaml(recipe))
    for name in ("grpo", "sft"):
        Path(f"{name}.yaml").unlink()
    written = load_recipe("written.yaml")
    assert compile_recipe(written).stages == stages
    assert resolved_yaml(written) == Path("written.yaml").read_text()


def test_overrides_replace_and_remove_sections(workspace: Path):
    recipe = load_recipe(
        "recipe.yaml",
        ["evaluation=null", "warm_start={steps: 2, prompts_per_step: 4, lr: 1}", "output=out"],
    )
    assert recipe.evaluation is None
    assert recipe.warm_start is not None and recipe.warm_start.lr == 1.0
    assert recipe.folder == "out"


def test_extra_roles_are_rewards(workspace: Path):
    recipe = load_recipe("recipe.yaml", ["roles.brevity={function: length}"])
    assert list(recipe.roles.rewards()) == ["reward", "brevity"]
    assert recipe.roles.kinds()["brevity"] == "reward"


CASES = [
    ("steps=0", "`steps` must be greater than or equal to 1, not 0"),
    ("steps=true", "must be a valid integer"),
    ("steps='3'", "must be a valid integer"),
    ("roles.actor.optimizer.lr=0", "must be greater than 0"),
    ("roles.actor.optimizer.lr=.inf", "finite"),
    ("roles.rollout.sampling.top_p=0", "must be greater than 0"),
    ("roles.rollout.sampling.top_p=1.1", "must be less than or equal to 1"),
    ("roles.rollout.sampling.top_k=0", "must be at least 1, or -1"),
    ("algorithm.clip=-1.0", "`algorithm.clip` must be a number above 0"),
    ("algorithm.clip=[0.2, 0]", "`algorithm.clip` must be a number above 0"),
    ("algorithm.clip=[0.1]", "`algorithm.clip` must be a number above 0"),
    ("steps=100000000000000000000", "must be less than or equal to 2147483647"),
    ("seed=2147483648", "must be less than or equal to 2147483647"),
    ("roles.rollout.sync.timeout_seconds=0.5", "must be greater than or equal to 1"),
    ("roles.reward.timeout_seconds=1e300", "must be less than or equal to 10000000"),
    ("name=3", "`name` must be a text, not 3. Fix: write letters, or quote it"),
    (
        "roles.brevity={functio: length}",
        "valid: actor, critic, reference, reward, rollout. A reward role",
    ),
    ("algorithm.clip=[0.1, 0.2, 0.3]", "`algorithm.clip` must be a number above 0"),
    ("roles.actor.optimizer.betas=[0.9]", "two numbers in [0, 1)"),
    ("name=a/b", "without slashes"),
    ("name=..", "without slashes"),
    ("name=.", "without slashes"),
    ("name='a b'", "without slashes"),
    ("roles.reward.function=a b", "must name a function"),
    ("roles.reward.function=x.py:", "must name a function"),
    ("model.dtype=float16", "must be 'float32' or 'bfloat16'"),
    ("dataflow=3", "must be a dataflow's name"),
    ("model=3", "`model` must be a mapping"),
    ("roles.actor.paralel={tp: 2}", "did you mean 'parallel'?"),
    ("algoritm.clip=0.2", "did you mean 'algorithm'?"),
    ("roles.refrence={colocate: actor}", "unknown role 'refrence'"),
    (
        "roles.plicy={colocate: actor}",
        "did you mean 'policy'? Valid: actor, critic, reference, rew",
    ),
    (
        "roles={actor: {optimizer: {lr: 1.0}}, policy: {}}",
        "`roles.policy` and `roles.actor` are the same role",
    ),
    ("roles.reference.colocate=rollout", "must be 'actor'"),
    ("evaluation={}", "`evaluation.every` is missing. Fix: add `every: 1`"),
    ("model.path.x=1", "`model.path`, a plain value"),
    ("steps", "'steps' is no override"),
    ("steps=[1", "not valid YAML"),
]


@pytest.mark.parametrize(("override", "message"), CASES)
def test_one_fault_each(workspace: Path, override: str, message: str):
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml", [override])
    assert [message in str(fault) for fault in caught.value.faults] == [True], caught.value
    assert caught.value.faults[0].where == "command line"


def test_all_faults_of_form_at_once_with_their_lines(workspace: Path):
    text = (workspace / "recipe.yaml").read_text()
    text = text.replace("steps: 5", "steps: -5\nsteps: 6\nsed: 3").replace("lr: 1e-3", "lr: x")
    (workspace / "recipe.yaml").write_text(text)
    draft = read_draft("recipe.yaml")
    assert {(fault.where, fault.what.split(" ")[0]) for fault in draft.faults} == {
        ("recipe.yaml:10", "`steps`"),
        ("recipe.yaml:11", "duplicate"),
        ("recipe.yaml:12", "unknown"),
        ("recipe.yaml:14", "`roles.actor.optimizer.lr`"),
    }
    assert draft.recipe is not None and draft.recipe.steps == 1


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "\x00", "3"])
def test_texts_that_are_no_recipe(workspace: Path, text: str):
    (workspace / "bad.yaml").write_text(text)
    with pytest.raises(RecipeError):
        load_recipe("bad.yaml")
    with pytest.raises(RecipeError, match="cannot read"):
        load_recipe("absent.yaml")
