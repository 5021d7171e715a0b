"""What `hybridflow make` makes: whole, the same each time, and loadable by transformers."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.assets import make_quickstart, make_reasoning_gym
from hybridflow.assets.build import MANIFEST, make
from hybridflow.cli import main
from hybridflow.data import load_dataset, read_table
from hybridflow.rewards import REWARDS
from tests.data.settings import Settings


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets") / "quickstart"
    assert make_quickstart(folder)
    return folder


def test_quickstart_is_the_same_every_time_and_made_once(quickstart, tmp_path):
    before = contents(quickstart)
    state = torch.random.get_rng_state()
    assert not make_quickstart(quickstart)
    assert make_quickstart(tmp_path / "again")
    assert contents(tmp_path / "again") == before == contents(quickstart)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert make_quickstart(tmp_path / "other", seed=1)
    assert contents(tmp_path / "other")["model.safetensors"] != before["model.safetensors"]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["again", "other"]


def test_quickstart_loads_in_transformers(quickstart):
    model = AutoModelForCausalLM.from_pretrained(quickstart)
    tokenizer = AutoTokenizer.from_pretrained(quickstart)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
    assert len(tokenizer) == model.config.vocab_size == 16
    assert tokenizer.chat_template is None
    ids = tokenizer("07+85=092")["input_ids"]
    assert len(ids) == 9 and tokenizer.decode(ids) == "07+85=092"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == (
        "07+85=092"
    )
    assert tokenizer("a")["input_ids"] == [tokenizer.unk_token_id]
    for settings in (model.config, model.generation_config):
        assert settings.eos_token_id == tokenizer.eos_token_id == 1
        assert settings.pad_token_id == tokenizer.pad_token_id == 0


def test_quickstart_rows_are_right_and_held_out(quickstart):
    train, held_out = (read_table(quickstart / f"{n}.jsonl").rows for n in ("train", "eval"))
    assert (len(train), len(held_out)) == (9500, 500)
    assert len({row["prompt"] for row in [*train, *held_out]}) == 10_000
    for row in [*train, *held_out]:
        first, second = row["prompt"].removesuffix("=").split("+")
        assert len(row["prompt"]) == 6 and row["answer"] == f"{int(first) + int(second):03d}"


def test_a_damaged_asset_is_made_again_and_a_changed_one_is_kept(quickstart, tmp_path):
    folder = tmp_path / "quickstart"
    shutil.copytree(quickstart, folder)
    (folder / "config.json").unlink()
    assert make_quickstart(folder)
    assert contents(folder) == contents(quickstart)
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"prompt": "1+1=", "answer": "2"}\n')
    with pytest.raises(ValueError, match=r"has changed since it was made \(train.jsonl\)"):
        make_quickstart(folder)


def test_a_folder_of_someone_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no `hybridflow make` wrote it"):
        make_quickstart(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        make(tmp_path / "asset", {}, build)
    assert list(tmp_path.iterdir()) == []


def test_reasoning_gym_rows_score_their_own_answer(tmp_path):
    pytest.importorskip("reasoning_gym")
    tasks = ("chain_sum", "basic_arithmetic")
    assert make_reasoning_gym(tmp_path / "a", tasks=tasks, rows=40, seed=5)
    assert not make_reasoning_gym(tmp_path / "a", tasks=tasks, rows=40, seed=5)
    train, held_out = (read_table(tmp_path / "a" / f"{n}.jsonl").rows for n in ("train", "eval"))
    rows = [*train, *held_out]
    assert (len(train), len(held_out)) == (40, 4)
    assert len({row["prompt"] for row in rows}) == 44
    names = [row["metadata"]["source_dataset"] for row in rows]
    assert names.count("chain_sum") >= 15 and names.count("basic_arithmetic") >= 15
    score = REWARDS["reasoning_gym"]
    assert all(score(row["prompt"], row["answer"], row["answer"], row) == 1.0 for row in rows)
    make_reasoning_gym(tmp_path / "b", tasks=tasks, rows=40, seed=6)
    assert contents(tmp_path / "b")["train.jsonl"] != contents(tmp_path / "a")["train.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["chain_sums"]}, "no task 'chain_sums'; did you mean 'chain_sum'"),
        ({"rows": 5}, "at least 10 are needed"),
        ({"tasks": []}, "no task is named"),
        ({"tasks": ["chain_sum:max_term=3"]}, "did you mean 'max_terms'"),
        ({"tasks": ["chain_sum:max_terms"]}, "no setting=value"),
        ({"tasks": ["chain_sum:max_terms=1"]}, "refuses 'chain_sum:max_terms=1'"),
        ({"tasks": ["coin_flip"], "rows": 3000}, "different prompts"),
    ],
)
def test_reasoning_gym_mistakes(tmp_path, options, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=message):
        make_reasoning_gym(tmp_path / "a", **options)
    assert list(tmp_path.iterdir()) == []


def run_make(*arguments):
    return main(["make", *map(str, arguments)])


def test_command_makes_once_and_reports_mistakes(tmp_path, capsys):
    assert run_make("quickstart", tmp_path / "q", "--seed", 2) == 0
    assert run_make("quickstart", tmp_path / "q", "--seed", 2) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'q'}: made",
        f"{tmp_path / 'q'}: already whole",
    ]
    assert json.loads((tmp_path / "q" / MANIFEST).read_text())["options"]["seed"] == 2
    assert run_make("reasoning-gym", tmp_path / "r", "--rows", 1) == 2
    assert "at least 10" in capsys.readouterr().err


def test_made_data_loads_with_the_made_tokenizer(quickstart):
    tokenizer = AutoTokenizer.from_pretrained(quickstart)
    dataset = load_dataset(Settings(), tokenizer, quickstart / "eval.jsonl")
    assert set(dataset.prompts.lengths.tolist()) == {6}
    assert set(dataset.responses["answer"].lengths.tolist()) == {4}


def test_an_older_revision_is_made_anew(quickstart, tmp_path):
    folder = tmp_path / "quickstart"
    shutil.copytree(quickstart, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["options"]["revision"] = 1
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert make_quickstart(folder)
    assert contents(folder) == contents(quickstart)
