"""`hybridflow data`: samples and summary as a user reads them."""

import io

import pytest
from rich.console import Console

from hybridflow.assets import make_quickstart
from hybridflow.cli import main
from hybridflow.data import PromptStream, load_dataset
from hybridflow.data.show import sample, summary, tokens
from tests.data.settings import Settings

RECIPE = """
name: show
model: {{path: {folder}}}
cluster: {{devices_per_node: 2}}
steps: 1
data: {{train: {folder}/train.jsonl, eval: {folder}/eval.jsonl, prompts_per_step: 2}}
roles:
  actor: {{optimizer: {{lr: 1e-6}}}}
  rollout: {{engine: local, sampling: {{max_tokens: 4}}}}
  reward: {{function: exact_match}}
dataflow: grpo
"""


def text_of(renderable):
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def dataset(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"prompt": "12+3=", "answer": "15"}\n'
        '{"prompt": "1", "answer": "1"}\n'
        '{"prompt": "123456789", "answer": "1"}\n'
    )
    return load_dataset(Settings(max_prompt_tokens=5), tokenizer, path)


def test_tokens_show_pieces_ids_and_what_is_trained(dataset, tokenizer):
    text = tokens(dataset.row(0), tokenizer)
    assert text.plain == "1/4 2/5 +/13 3/6 =/15 1/4 5/8 <eos>/1"
    trained = [text.plain[s.start : s.end].strip() for s in text.spans if "green" in str(s.style)]
    assert trained == ["1/4", "5/8", "<eos>/1"]


def test_a_sample_shows_text_answer_and_mask(dataset, tokenizer):
    shown = text_of(sample(dataset.row(0), tokenizer, number=7))
    for part in ("sample 7", "12+3=", "0 for 5 prompt tokens", "1 for 3 answer tokens"):
        assert part in shown


def test_a_pair_shows_both_responses(tmp_path, tokenizer):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "1", "chosen": "23", "rejected": "4", "margin": 0.5}\n')
    row = load_dataset(Settings(), tokenizer, path, ("prompts", "pairs", "margins")).row(0)
    shown = text_of(sample(row, tokenizer, number=0))
    for part in ("2/5 3/6 <eos>/1", "4/7 <eos>/1", "0.5", "1 for 5 response tokens of both"):
        assert part in shown


def test_the_summary_counts_what_is_left_out(dataset):
    assert summary(dataset, Settings(max_prompt_tokens=5)).splitlines() == [
        "3 rows, 2 prompts kept, 1 left out: longer than data.max_prompt_tokens=5",
        "prompts have 1 to 5 tokens (half have at most 1, nine in ten at most 5)",
        "answers have 2 to 3 tokens (half have at most 2, nine in ten at most 3), "
        "the end of sequence included",
    ]


def test_command_shows_the_first_rows_of_the_run(tmp_path, capsys, monkeypatch, tokenizer):
    monkeypatch.setenv("COLUMNS", "100")
    folder = tmp_path / "quickstart"
    make_quickstart(folder)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    assert run("data", recipe, "--rows", 2) == 0
    shown = capsys.readouterr().out
    training = load_dataset(Settings(), tokenizer, folder / "train.jsonl")
    for row in PromptStream(training, seed=0).next(2):
        assert row.prompt_text in shown
    assert "9,500 rows" in shown and "6 tokens each" in shown
    assert "evaluation:" not in shown, "nothing is evaluated"
    assert run("data", recipe, "--rows", 1, "evaluation={every: 1}") == 0
    assert "\n500 rows" in capsys.readouterr().out
    assert run("data", recipe, "data.answer_column=answers") == 2
    assert "did you mean 'answer'" in capsys.readouterr().err
    assert run("data", recipe, f"model.path={tmp_path}") == 2
    assert "has no tokenizer that loads" in capsys.readouterr().err
