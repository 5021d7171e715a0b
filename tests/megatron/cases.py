"""A batch and what an engine makes of it, for every layout to repeat."""

from typing import Any

import torch
import torch.distributed as dist

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster.transfer import dealt
from hybridflow.megatron.config import EngineConfig, LossSettings, OptimizerSettings
from hybridflow.megatron.engine import Engine
from hybridflow.recipe.axes import Axis
from megatron_bridge.layout import ParallelLayout

PROMPTS, SAMPLES = 4, 3
# A large eps: Adam would else blow the rounding of vanishing gradients up to whole steps.
OPTIMIZER = OptimizerSettings(lr=3e-3, eps=1e-4, weight_decay=0.1, clip_grad=0.5)
GRPO = LossSettings(kl_coef=0.05, clip_high=0.28, temperature=0.8)


def make_batch(seed: int = 0, vocab: int = 37) -> Batch:
    """Prompts of 2 to 9 tokens, responses of 1 to 7, every field that a loss may read."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> torch.Tensor:
        length = int(torch.randint(low, high + 1, (1,), generator=generator))
        return torch.randint(0, vocab, (length,), generator=generator)

    rows = PROMPTS * SAMPLES
    responses = Ragged.from_rows([ids(1, 7) for _ in range(rows)])

    def logprobs() -> Ragged:
        noise = torch.rand(len(responses.values), generator=generator)
        return responses.with_values(-3.0 - noise)

    fields: dict[str, tuple[Axis, Any]] = {
        "prompts": (Axis.PROMPTS, Ragged.from_rows([ids(2, 9) for _ in range(PROMPTS)])),
        "responses": (Axis.TOKENS, responses),
        "advantages": (Axis.SAMPLES, torch.randn(rows, generator=generator)),
        "rollout_logprobs": (Axis.TOKENS, logprobs()),
        "ref_logprobs": (Axis.TOKENS, logprobs()),
    }
    return Batch(
        {name: data for name, (_, data) in fields.items()},
        {name: axis for name, (axis, _) in fields.items()},
        PROMPTS,
        SAMPLES,
    )


def make_engine(path: str, layout: ParallelLayout, **options: Any) -> Engine:
    config: dict[str, Any] = {"optimizer": OPTIMIZER, "micro_batch_tokens": 32} | options
    return Engine(EngineConfig(path, layout, **config))


def my_part(batch: Batch, layout: ParallelLayout, mini_batches: int = 1) -> Batch:
    """This rank's rows."""
    return dealt(batch, mini_batches, layout.dp)[layout.coordinates(dist.get_rank()).dp]


def two_steps(
    path: str, layout: ParallelLayout, batch: Batch, loss: LossSettings, **options: Any
) -> dict[str, Any]:
    """Log-probabilities before, metrics of two updates, log-probabilities and weights after."""
    engine = make_engine(path, layout, **options)
    part = my_part(batch, layout)
    before = engine.logprobs(part, loss.temperature)
    metrics = [engine.update(part, loss) for _ in range(2)]
    return {
        "before": before,
        "metrics": metrics,
        "after": engine.logprobs(part, loss.temperature),
        "weights": {name: tensor.clone() for name, tensor in engine.export_weights()},
    }


def merged(results: list[dict[str, Any]], key: str) -> Ragged:
    """A field of log-probabilities over data-parallel ranks; None elsewhere."""
    return Ragged.concat([result[key] for result in results if result[key] is not None])
