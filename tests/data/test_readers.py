"""Rows from every format, and faults with file and line."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.data import read_table

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "ü\n2", "answer": "4,0"}]


def write(path, fmt):
    if fmt == "jsonl":
        text = "\n\n".join(json.dumps(row) for row in ROWS)
        path.write_text("\ufeff" + text, encoding="utf-8")
    elif fmt == "csv":
        path.write_text('prompt,answer\r\n1+1=,2\r\n"ü\n2","4,0"\r\n', "utf-8", newline="")
    elif fmt == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return path


@pytest.mark.parametrize("fmt", ["jsonl", "csv", "parquet", "folder"])
def test_every_format_gives_the_same_rows(tmp_path, fmt):
    path = write(tmp_path / f"data.{fmt}", fmt)
    table = read_table(path)
    assert table.columns == ("prompt", "answer")
    assert [dict(table.rows[i]) for i in range(len(table.rows))] == ROWS
    if fmt in ("jsonl", "csv"):
        assert table.where(1) == f"{path}:3"
    else:
        assert table.where(1) == f"{path}, row 1"


def test_messages_survive_parquet(tmp_path):
    messages = [{"role": "user", "content": "hello"}]
    table = pyarrow.Table.from_pylist([{"prompt": messages, "answer": "x"}])
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    assert read_table(tmp_path / "d.parquet").rows[0]["prompt"] == messages


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": 1,}\n[1]\n', r"a.jsonl:2: not JSON.*\n.*a.jsonl:3: a row is"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "a.jsonl:2: not UTF-8 at byte 7"),
        ("a.jsonl", b"\n\n", "a.jsonl: the file is empty"),
        ("a.jsonl", b'\n{"a": ' + b"9" * 5000 + b"}", "a.jsonl:2: not JSON: Exceeds the limit"),
        ("a.jsonl", b'{"a": ' + b"[" * 99_999, "a.jsonl:1: not JSON: its brackets are nested too"),
        ("a.jsonl", rb'{"a": "1", "b": ["\ud83d"]}', r"a.jsonl:1: column 'b' has \\ud83d, half of"),
        ("a.csv", b"", "a.csv: the file is empty"),
        ("a.csv", b"a,b\n", "a.csv: the file is empty"),
        ("a.csv", b'a,b\n"1\n2",3\n4\n', "a.csv:4: 1 values for 2 columns"),
        ("a.csv", b'a,b\n1,"2\n', "a.csv:.*: no CSV"),
        ("a.csv", b"a,a\n1,2\n", "a.csv:1: a column name stands twice"),
        ("a.parquet", b"PAR1 but no more", "a.parquet: no Parquet file"),
        ("a.txt", b"x", r"a.txt: data is read from .jsonl.*not from '.txt'"),
    ],
)
def test_faults_name_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / name)


def test_pairs_of_surrogates_and_long_fields_are_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rb'{"a": "\ud83d\ude00"}')
    assert read_table(tmp_path / "a.jsonl").rows[0] == {"a": "\U0001f600"}
    (tmp_path / "a.csv").write_text("a\n" + "1" * 200_000 + "\n")
    assert len(read_table(tmp_path / "a.csv").rows[0]["a"]) == 200_000


@pytest.mark.parametrize("harm", ["cut", "emptied", "no state"])
def test_a_dataset_folder_that_is_not_whole_is_named(tmp_path, harm):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "set")
    (arrow,) = (tmp_path / "set").glob("*.arrow")
    if harm == "no state":
        (tmp_path / "set" / "state.json").unlink()
    else:
        arrow.write_bytes(arrow.read_bytes()[: 100 if harm == "cut" else 0])
    with pytest.raises(ValueError, match="/set: the dataset is not whole: .*; write it anew"):
        read_table(tmp_path / "set")


def test_many_faults_are_counted_not_listed(tmp_path):
    (tmp_path / "a.jsonl").write_text("x\n" * 40)
    with pytest.raises(ValueError, match=r"and 35 more in .*a.jsonl") as caught:
        read_table(tmp_path / "a.jsonl")
    assert len(str(caught.value).splitlines()) == 6


def test_a_missing_file_and_folders_that_are_no_dataset(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        read_table(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="no HuggingFace dataset"):
        read_table(tmp_path)
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"splits \(test, train\); name one, such as .*/test"):
        read_table(tmp_path / "splits")
    assert len(read_table(tmp_path / "splits" / "train").rows) == 2
