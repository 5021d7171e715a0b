"""TRL's side of benchmarks/grpo_cpu.py: GRPOTrainer on the steps that a JSON file describes.

    python -m benchmarks.peers.trl_grpo SPEC RESULT

Runs in its own environment, in one process or under ``torch.distributed.run``. Everything that
costs time and that the task does not ask for is off: gradient checkpointing, logged completions,
saving.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.scoring import share_of_digits


class MeasuredTrainer(GRPOTrainer):
    """GRPOTrainer that notes what each generation took and made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generations: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):  # noqa: ANN001, ANN202
        start = time.perf_counter()
        result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        note = {"seconds": time.perf_counter() - start, "prompts": [list(p) for p in prompt_ids]}
        self.generations.append({**note, "lengths": [len(tokens) for tokens in result[0]]})
        return result


class StepEnds(TrainerCallback):
    """Notes when each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:  # noqa: ANN001
        self.ends.append((time.perf_counter(), time.time()))


def reward(prompts: list, completions: list, **columns: Any) -> list[float]:
    """The shared reward on TRL's arguments; chat completions are lists of messages."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [share_of_digits("", text, None, {}) for text in texts]


def dataset(spec: dict[str, Any]) -> Dataset:
    """The prompts in the file's order, as text or as chat messages."""
    lines = Path(spec["prompts_file"]).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    if spec["chat"]:
        return Dataset.from_list(
            [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
        )
    return Dataset.from_list([{"prompt": prompt} for prompt in prompts])


def settings(spec: dict[str, Any], ranks: int, folder: Path) -> GRPOConfig:
    """The same algorithm as the recipe: clipped, token mean, no KL, one update on-policy."""
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=spec["prompts"] * spec["samples"] // ranks,
        gradient_accumulation_steps=1,
        num_generations=spec["samples"],
        max_completion_length=spec["max_tokens"],
        max_steps=spec["warmup"] + spec["steps"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=spec["betas"][0],
        adam_beta2=spec["betas"][1],
        weight_decay=0.0,
        max_grad_norm=spec["clip_grad"],
        epsilon=spec["clip"],
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        scale_rewards="group",
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False if ranks > 1 else None,
        logging_steps=1,
        log_completions=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )


def steps_of(trainer: MeasuredTrainer, ends: StepEnds, warmup: int) -> list[dict[str, Any]]:
    """What each step after the warm-up (one step at least) took, from the end of the step before
    to its own."""
    rows = []
    for step in range(warmup, len(ends.ends)):
        (start, _), (end, clock) = ends.ends[step - 1], ends.ends[step]
        made = trainer.generations[step]
        rows.append(
            {
                "seconds": end - start,
                "ended_at": clock,
                "nodes": {"generate": made["seconds"]},
                "lengths": made["lengths"],
                "prompts": made["prompts"],
            }
        )
    return rows


def joined(rows_of_ranks: list[list[dict[str, Any]]], samples: int) -> list[dict[str, Any]]:
    """The steps of all ranks as one: the first rank's times, everybody's samples."""
    joint = []
    for parts in zip(*rows_of_ranks, strict=True):
        prompts = [tokens for part in parts for tokens in part["prompts"]][::samples]
        joint.append(
            {
                **parts[0],
                "lengths": [n for part in parts for n in part["lengths"]],
                "prompt_lengths": [len(tokens) for tokens in prompts],
                "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            }
        )
    return joint


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    result = Path(sys.argv[2])
    ranks, threads = spec["ranks"], spec["threads"]
    torch.set_num_threads(threads // ranks)
    ends = StepEnds()
    trainer = MeasuredTrainer(
        model=spec["model"],
        reward_funcs=reward,
        args=settings(spec, ranks, result.parent / "trl"),
        train_dataset=dataset(spec),
        callbacks=[ends],
    )
    trainer.train()
    assert len(trainer.generations) == len(ends.ends), "one generation for every step"
    assert all(p.dtype is torch.float32 for p in trainer.model.parameters())
    rows = steps_of(trainer, ends, spec["warmup"])
    of_ranks: list[Any] = [rows]
    if ranks > 1:
        assert dist.get_world_size() == ranks
        of_ranks = [None] * ranks
        dist.all_gather_object(of_ranks, rows)
    if trainer.accelerator.is_main_process:
        steps = joined(of_ranks, spec["samples"])
        result.write_text(json.dumps({"steps": steps, "threads": torch.get_num_threads()}))
    if ranks > 1:
        # Not destroy_process_group: it can wait for a thread of gloo that waits for Python's lock.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
