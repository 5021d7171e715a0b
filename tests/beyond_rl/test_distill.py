"""On-policy distillation: the student moves to the teacher, whose vocabulary must be its own."""

import json
from pathlib import Path

import torch

from hybridflow.algorithms import FUNCTIONS, FunctionContext
from hybridflow.batch import Batch, Ragged
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.checks import check
from hybridflow.recipe.load import load_recipe


def test_the_advantage_is_the_teachers_log_probability_over_the_students():
    student, teacher = Ragged.from_rows([[-1.0, -2.0], [-0.5]]), [-0.5, -3.0, -0.5]
    tokens = {"logprobs": student, "teacher_logprobs": student.with_values(torch.tensor(teacher))}
    batch = Batch(tokens, dict.fromkeys(tokens, Axis.TOKENS), 2, 1)
    found = FUNCTIONS["reverse_kl"](batch, FunctionContext(), scale=2.0)["advantages"]
    assert found.values.tolist() == [1.0, -2.0, 0.0]
    assert torch.equal(found.offsets, student.offsets)


def told(assets: Path, teacher: Path) -> list[str]:
    return [
        "roles.rollout={sampling: {max_tokens: 5}}",
        f"roles.teacher={{head: vocabulary, model: {teacher}, colocate: actor}}",
        *("evaluation.temperature=1.0", "data.prompts_per_step=8", "data.samples_per_prompt=4"),
    ]


def test_the_student_moves_to_the_teacher(run_recipe, assets: Path, other_model: Path):
    lr = "roles.actor.optimizer.lr=2e-2"
    steps = run_recipe("distill", *told(assets, other_model), "steps=8", lr, "export=false")
    gaps = [step["update/kl"] for step in steps]
    assert gaps[0] > 0.05 and sum(gaps[-2:]) < sum(gaps[:2])
    held_out = [step["eval/kl"] for step in steps if "eval/kl" in step]
    assert len(held_out) == 4 and held_out[-1] < held_out[0]


def test_another_vocabulary_is_a_fault(write_recipe, assets: Path, tmp_path: Path):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    for file in (assets / "plain").iterdir():
        (teacher / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    recipe = load_recipe(write_recipe("distill"), told(assets, teacher))
    (fault,) = check(recipe)
    assert "2 tokens differ, such as '7'" in str(fault) and "same tokenizer" in str(fault)
