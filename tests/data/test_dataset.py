"""From rows to token ids: templates, filters, targets and faults."""

import json

import pytest

from hybridflow.data import load_dataset
from tests.data.settings import Settings


@pytest.fixture
def data(tmp_path):
    """Write rows as JSONL and give the file's path."""

    def write(*rows):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_plain_prompts_answers_and_targets(data, tokenizer):
    path = data({"prompt": "12+3=", "answer": "15", "extra": [1]}, {"prompt": "7", "answer": 7})
    dataset = load_dataset(Settings(), tokenizer, path)
    assert (len(dataset), dataset.total, dataset.dropped) == (2, 2, 0)
    first, second = dataset.row(0), dataset.row(1)
    assert first.prompt_text == "12+3=" and first.answer == "15"
    assert first.prompt_ids == tokenizer("12+3=")["input_ids"]
    assert first.answer_ids == [*tokenizer("15")["input_ids"], tokenizer.eos_token_id]
    assert first.row == {"prompt": "12+3=", "answer": "15", "extra": [1]}
    assert second.answer == 7 and len(second.answer_ids) == 2
    assert dataset.prompts.lengths.tolist() == [5, 1]
    assert dataset.where(1) == f"{path}:2"
    with pytest.raises(IndexError):
        dataset.row(2)


def test_long_prompts_are_left_out_and_counted(data, tokenizer):
    rows = [{"question": "1" * n, "answer": str(n)} for n in (3, 9, 4, 8)]
    settings = Settings(prompt_column="question", max_prompt_tokens=4)
    dataset = load_dataset(settings, tokenizer, data(*rows))
    assert (len(dataset), dataset.total, dataset.dropped) == (2, 4, 2)
    assert [dataset.row(i).answer for i in range(2)] == ["3", "4"]
    with pytest.raises(ValueError, match=r"all 4 prompts.*the shortest has 3"):
        load_dataset(Settings("question", max_prompt_tokens=2), tokenizer, data(*rows))


def test_the_template_is_used_when_there_is_one(data, chat_tokenizer):
    path = data({"prompt": "1+1=", "answer": "2"})
    row = load_dataset(Settings(), chat_tokenizer, path).row(0)
    assert row.prompt_text == "u:1+1=\na:"
    assert chat_tokenizer.decode(row.answer_ids) == "2<eos>"
    row = load_dataset(Settings(chat=False), chat_tokenizer, path).row(0)
    assert row.prompt_text == "1+1="


def test_messages_and_system_prompt(data, chat_tokenizer):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "1"}]
    path = data(
        {"prompt": [{"role": "user", "content": "1", "name": "x"}], "answer": ""},
        {"prompt": own, "answer": ""},
    )
    dataset = load_dataset(Settings(system="be brief"), chat_tokenizer, path)
    assert dataset.row(0).prompt_text == "s:be brief\nu:1\na:"
    assert dataset.row(1).prompt_text == "s:own\nu:1\na:"


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"promt": "1", "answer": "2"}, Settings(), r"no column 'prompt' \(data.prompt_column\)"),
        ({"promt": "1", "answer": "2"}, Settings(), "did you mean 'promt'"),
        (
            {"prompt": None, "answer": "2"},
            Settings(),
            r"data.jsonl:1: column 'prompt': it is empty \(null",
        ),
        ({"prompt": "", "answer": "2"}, Settings(), "data.jsonl:1: the prompt is empty"),
        (
            {"prompt": "1", "answer": None},
            Settings(),
            "data.jsonl:1: column 'answer': it must be text",
        ),
        (
            {"prompt": [{}], "answer": "2"},
            Settings(),
            "no chat template is used: the prompt must be text",
        ),
        ({"prompt": "1", "answer": "2"}, Settings(chat=True), "tokenizer has no chat template"),
        ({"prompt": "1", "answer": "2"}, Settings(system="x"), "data.system needs a chat template"),
    ],
)
def test_faults_of_plain_data(data, tokenizer, row, settings, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(settings, tokenizer, data(row))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "not an empty list"),
        (3, "not a int: 3"),
        ([{"role": "user"}], "message 0 must be an object"),
        ([{"role": "user", "content": "1"}, "2"], "message 1 must be an object"),
        ([{"role": "assistant", "content": "1"}], "ends with a message of the assistant"),
    ],
)
def test_faults_of_messages(data, chat_tokenizer, prompt, message):
    with pytest.raises(ValueError, match=f"data.jsonl:1: .*{message}"):
        load_dataset(Settings(), chat_tokenizer, data({"prompt": prompt, "answer": "2"}))


def test_a_row_without_the_column_is_named(data, tokenizer):
    path = data({"prompt": "1", "answer": "2"}, {"prompt": "1", "anwser": "2"})
    with pytest.raises(ValueError, match="data.jsonl:2: the row has no 'answer'.*'anwser'"):
        load_dataset(Settings(), tokenizer, path)


def test_a_tokenizer_must_know_how_to_end(data, tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        load_dataset(Settings(), tokenizer, data({"prompt": "1", "answer": "2"}))
