"""A run that goes on finds the data that it began with, or says what differs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from hybridflow.assets.quickstart import character_tokenizer
from hybridflow.data import PromptStream, load_dataset
from hybridflow.dataflow.data_record import check_data_record, data_record, keep_data_record
from hybridflow.dataflow.feed import Feed
from hybridflow.dataflow.run_folder import RunFolder
from tests.data.settings import Settings

ROWS = [{"prompt": str(i), "answer": str(i)} for i in range(5)]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def record_of(path: Path, held_out: Path | None = None, chat: str | None = None) -> dict[str, Any]:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = chat
    dataset = load_dataset(Settings(max_prompt_tokens=3), tokenizer, path)
    data = SimpleNamespace(eval=None if held_out is None else str(held_out))
    own = [str(own) for own in path.parent.glob("own.py")]
    told = SimpleNamespace(evaluation=held_out, data=data, imports=own)
    plan: Any = SimpleNamespace(recipe=told)
    return data_record(plan, {"main": Feed(PromptStream(dataset, 0), 1, [])})


@pytest.fixture
def begun(tmp_path: Path) -> RunFolder:
    """The folder of a run on five rows and as many held-out ones."""
    folder = RunFolder(tmp_path)
    for name in ("train", "eval"):
        write(tmp_path / f"{name}.jsonl", ROWS)
    keep_data_record(folder, record_of(tmp_path / "train.jsonl", tmp_path / "eval.jsonl"))
    return folder


CHANGES = {
    "fewer rows": (ROWS[:4], r"train.jsonl has 4 rows, and had 5 when the run began; put the file"),
    "appended": ([*ROWS, ROWS[0]], "train.jsonl has 6 rows, and had 5"),
    "one that is too long": ([*ROWS[:4], {"prompt": "1111", "answer": ""}], "has 4 rows that fit"),
    "another order": (ROWS[::-1], r"train.jsonl has another content than when .* \(sha256 \w{12}"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_are_refused(begun: RunFolder, change: str):
    rows, message = CHANGES[change]
    train, held_out = begun.path / "train.jsonl", begun.path / "eval.jsonl"
    write(train, rows)
    with pytest.raises(ValueError, match=message):
        check_data_record(begun, record_of(train, held_out))


def test_held_out_rows_are_compared_too(begun: RunFolder):
    write(begun.path / "eval.jsonl", ROWS[1:])
    with pytest.raises(ValueError, match="eval.jsonl has another content"):
        check_data_record(begun, record_of(begun.path / "train.jsonl", begun.path / "eval.jsonl"))


def test_the_same_data_and_other_tokens(begun: RunFolder):
    train = begun.path / "train.jsonl"
    train.touch()
    write(train, ROWS)
    assert check_data_record(begun, record_of(train)) == [], "times do not matter"
    (doubt,) = check_data_record(begun, record_of(train, chat="{{ messages[0].content }}="))
    assert "give other tokens" in doubt and "chat template" in doubt
    (begun.path / "data.json").unlink()
    (doubt,) = check_data_record(begun, record_of(train))
    assert "has no data.json" in doubt


def test_other_code_is_told(begun: RunFolder):
    train, mine = begun.path / "train.jsonl", begun.path / "own.py"
    mine.write_text("one")
    assert check_data_record(begun, record_of(train)) == [], "an older record knows no code"
    keep_data_record(begun, record_of(train))
    assert check_data_record(begun, record_of(train)) == []
    mine.write_text("two")
    (doubt,) = check_data_record(begun, record_of(train))
    assert "own.py" in doubt and "has another content than when the run began" in doubt


def test_folders_are_told_apart_by_their_content(tmp_path: Path):
    found = []
    for name, rows in (("a", ROWS), ("b", ROWS), ("c", ROWS[::-1])):
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / name)
        found.append(record_of(tmp_path / name)["main"]["sha256"])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"main": {"path": "x"}}', '{"main": 3}'])
def test_a_damaged_record_is_one_message(begun: RunFolder, text: str) -> None:
    (begun.path / "data.json").write_text(text)
    with pytest.raises(ValueError, match=r"data.json is damaged .*remove it"):
        check_data_record(begun, {"main": {"path": "x", "sha256": "0"}})
