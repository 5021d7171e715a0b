"""Faults of the files and folders that a recipe names: models, data, the run's own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.recipe.checks import check_file

from .conftest import CONFIG, write_rows, write_weights

ROOT = Path(__file__).parents[2]
SUPERVISED = ("roles.reference=null", "roles.reward=null", "algorithm.kl={}")
"""What steps on answers have no use for."""


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", overrides)[1]]


def test_reasoning_gym_scores_rows_with_their_task(workspace: Path):
    gym = "roles.reward={function: reasoning_gym}"
    found = faults_of(gym)
    assert len(found) == 2 and "eval.jsonl has no column 'metadata'" in found[1]
    for name in ("train", "eval"):
        rows = '{"prompt": "a", "answer": "b", "metadata": {}}\n' * 12
        Path(f"{name}.jsonl").write_text(rows)
    assert faults_of(gym) == []


def test_a_column_that_no_row_has_is_one_fault_of_each_file(workspace: Path):
    found = faults_of("data.prompt_column=promt")
    assert [fault.split(" ")[2] for fault in found] == ["train.jsonl", "eval.jsonl"]
    assert all("no column 'promt'. Fix: did you mean 'prompt'?" in fault for fault in found)


OUTPUTS = [
    (".", "is or holds the working directory"),
    ("/", "is or holds the working directory"),
    ("train.jsonl", "train.jsonl is no folder"),
    ("train.jsonl/run", "train.jsonl is no folder"),
    ("model", "model holds something else than a run"),
]


@pytest.mark.parametrize(("output", "what"), OUTPUTS)
def test_folders_that_cannot_become_a_runs(workspace: Path, output: str, what: str):
    (found,) = faults_of(f"output={output}")
    assert found.startswith("command line: ") and what in found and "Fix: name" in found


def test_folders_that_can_become_a_runs(workspace: Path):
    (workspace / "empty").mkdir()
    (workspace / "earlier").mkdir()
    (workspace / "earlier" / "metrics.jsonl").touch()
    for output in ("empty", "earlier", "deep/down/new"):
        assert faults_of(f"output={output}") == []


def _set(key: str, value: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        config = {**CONFIG, key: value}
        (model / "config.json").write_text(json.dumps(config))

    return change


def _truncate(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _float64(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F64"'))


def _fp8(model: Path) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for entry in header.values():
        entry["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    end = max(entry["data_offsets"][1] for entry in header.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def _quantized(model: Path) -> None:
    _set("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]})(model)
    _fp8(model)


def _index(weight_map: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        index = {"weight_map": weight_map}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def _lose_layer(model: Path) -> None:
    write_weights(model, {**CONFIG, "num_hidden_layers": 3})


MODELS: list[tuple[Callable[[Path], object], str]] = [
    (lambda model: (model / "config.json").unlink(), "model holds no config.json"),
    (lambda model: (model / "config.json").write_text("{"), "config.json: not valid JSON"),
    (lambda model: (model / "config.json").write_text("[]"), "config.json: not a JSON object"),
    (_set("hidden_size", "24"), "hidden_size must be positive"),
    (_set("architectures", ["GPT2LMHeadModel"]), "no table for GPT2LMHeadModel"),
    (_set("hidden_act", "gelu"), "config.json: hidden_act='gelu' is not supported"),
    (_set("vocab_size", 50), "embed_tokens.weight is [40, 24], not [50, 24]"),
    (lambda model: (model / "tokenizer.json").unlink(), "model holds no tokenizer"),
    (lambda model: (model / "model.safetensors").unlink(), "holds no *.safetensors"),
    (_truncate, "model.safetensors: truncated"),
    (lambda model: (model / "model.safetensors").write_bytes(b"abc"), "header is not whole"),
    (_float64, "weights of type F64"),
    (_fp8, "weights of type F8_E4M3, and its config.json has no quantization_config"),
    (_quantized, "hybridflow convert model model-bf16 --to huggingface"),
    (_lose_layer, "tensors: model.layers.3."),
    (_index({"a": "other.safetensors"}), "other.safetensors is missing"),
    (_index({"a": "../train.jsonl"}), "outside the folder"),
    (_index(3), "has no weight_map"),
]


@pytest.mark.parametrize(("change", "what"), MODELS)
def test_model_folders_that_cannot_be_used(
    workspace: Path, change: Callable[[Path], object], what: str
):
    change(workspace / "model")
    found = faults_of()
    assert len(found) == 1 and what in found[0], found


DATA = [
    (b'{"prompt": "a", "answer": "b"}\n{"prompt"\n', "train.jsonl:2: not JSON: Expecting"),
    (b"\n\xff\n", "train.jsonl:2: not UTF-8 at byte 0"),
    (b"[1]\n", "train.jsonl:1: a row is a JSON object"),
    (b'{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n', "train.jsonl:2: the row lacks 'answer'"),
    (b'{"prompt": "a\\ud800", "answer": "b"}\n', "train.jsonl:1: column 'prompt' has \\ud800"),
    (b"", "train.jsonl: the file holds no rows"),
    (b"x\n" * 9, "train.jsonl: 4 more lines are wrong"),
]


@pytest.mark.parametrize(("content", "what"), DATA)
def test_broken_data_names_the_line(workspace: Path, content: bytes, what: str):
    (workspace / "train.jsonl").write_bytes(content)
    found = faults_of("data.prompts_per_step=2", "roles.actor.parallel.dp=1")
    assert any(what in fault for fault in found), found


def test_a_column_twice_is_a_fault(workspace: Path):
    Path("twice.csv").write_text("prompt,answer,answer\n" + "a,b,c\n" * 9)
    assert faults_of("data.train=twice.csv") == [
        "twice.csv:1: a column name stands twice. Fix: mend the file."
    ]


def test_values_nested_without_end_are_a_fault(workspace: Path):
    Path("train.jsonl").write_text("[" * 100_000 + "\n")
    assert any("train.jsonl:1: not JSON: its brackets" in fault for fault in faults_of())
    assert "nested too deeply" in faults_of("seed=" + "[" * 10_000)[0]


def test_other_formats(workspace: Path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"prompt": ["a"] * 4, "answer": ["b"] * 4})
    pyarrow.parquet.write_table(table, "t.parquet")
    Path("t.csv").write_text("prompt,answer\n" + 'a,"b\nc"\n' * 4)
    folder = workspace / "set"
    folder.mkdir()
    with (
        pyarrow.OSFile("set/data.arrow", "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    for path in ("t.parquet", "t.csv", "set"):
        assert faults_of(f"data.train={path}") == []
        assert "has 4 rows" in faults_of(f"data.train={path}", "data.prompts_per_step=6")[0]
        assert "no column 'q'" in faults_of(f"data.train={path}", "data.prompt_column=q")[0]
    Path("t.parquet").write_bytes(b"PAR1 or not")
    assert "not valid Parquet" in faults_of("data.train=t.parquet")[0]
    assert "is no HuggingFace dataset" in faults_of("data.train=model")[0]
    Path("t.csv").write_text("prompt,answer\n" + "a,b\n" * 4 + "a,b,c\n")
    assert "t.csv:6: 3 values for 2 columns" in faults_of("data.train=t.csv")[0]
    Path("t.csv").write_bytes(b"prompt,answer\n\xff,b\n")
    assert "not UTF-8" in faults_of("data.train=t.csv")[0]


def test_quantised_weights_are_trained_where_nothing_is_sampled(workspace: Path):
    _quantized(workspace / "model")
    sft = (ROOT / "recipes/dataflows/sft.yaml").read_text().splitlines(keepends=True)
    flow = "".join(line for line in sft if " publish: " not in line).replace("publish", "update")
    Path("flow.yaml").write_text(flow)
    told = ["dataflow=flow.yaml", "evaluation=null", "data.samples_per_prompt=1", *SUPERVISED]
    assert faults_of(*told, "roles.rollout=null") == []


def test_a_copied_model_is_looked_at_again(workspace: Path):
    assert faults_of() == []
    shutil.rmtree(workspace / "model")
    write_rows(workspace / "train.jsonl", 1)
    assert len(faults_of()) == 2
