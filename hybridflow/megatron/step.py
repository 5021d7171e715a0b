"""Forward and backward passes over packs, under Megatron's pipeline schedules."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from hybridflow.algorithms.packing import Pack
from hybridflow.megatron import shared_prompts
from hybridflow.megatron.logprobs import VocabParallelLogits
from hybridflow.megatron.shared_prompts import sequences_of
from megatron_bridge import live
from megatron_bridge.registry import has_value_head

PackLoss = Callable[[Pack, Any], Tensor]
"""The loss of a pack from its ``VocabParallelLogits`` or, of a value head, its values ``[R]``."""


class PackedModel:
    """This rank's part of a model, run over packs.

    The output layer sees the predicting positions alone: logits of prompt tokens are never made,
    and those of one pack are all that exist at a time (per pipeline stage in flight). What a loss
    is handed are these logits, or the values ``[R]`` of a model with a value head.

    Args:
        model: a ``GPTModel`` or its data-parallel wrapper.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._predict_R: Tensor | None = None
        self._see_hidden: Callable[[Tensor], None] | None = None
        self.device = next(model.parameters()).device
        core: Any = live.unwrap(model)
        self._ends_in_values = has_value_head(live.origin(core).hf_config)
        self._positions = shared_prompts.install(core)
        if core.post_process:
            core.output_layer.register_forward_pre_hook(self._keep_predicting)

    @property
    def shares_prompts(self) -> bool:
        """Whether packs may hold a prompt once for several responses."""
        return self._positions is not None

    def infer(self, packs: list[Pack], temperature: float) -> list[Tensor]:
        """``[R]`` log-probabilities of every pack's labels, or values, without gradient.

        An empty list on all but the last pipeline stage.
        """

        def collect(pack: Pack) -> Callable[..., Tensor]:
            return lambda output_1RX, non_loss_data: _of_labels(
                self._output(pack, output_1RX, temperature)
            )

        with torch.no_grad():
            return self._run(packs, collect, forward_only=True)

    def evaluate(self, packs: list[Pack], temperature: float, loss: PackLoss) -> None:
        """Calls ``loss`` with every pack's logits or values, without gradient."""

        def look(pack: Pack) -> Callable[..., Tensor]:
            return lambda output_1RX, non_loss_data: loss(
                pack, self._output(pack, output_1RX, temperature)
            )

        with torch.no_grad():
            self._run(packs, look, forward_only=True)

    def hidden(self, packs: list[Pack]) -> list[Tensor]:
        """``[R, H]`` final hidden states of every pack's predicting positions, without gradient.

        An empty list on all but the last pipeline stage.
        """

        seen: list[Tensor] = []

        def collect(pack: Pack) -> Callable[..., Tensor]:
            return lambda _logits, non_loss_data: seen.pop()[:, 0]

        self._see_hidden = seen.append
        try:
            with torch.no_grad():
                return self._run(packs, collect, forward_only=True)
        finally:
            self._see_hidden = None

    def forward_backward(self, packs: list[Pack], temperature: float, loss: PackLoss) -> None:
        """Adds the gradient of ``sum over packs of loss(pack, logits)`` to the buffers, then
        averages them over data-parallel ranks."""

        def train(pack: Pack) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
            # The schedule divides by the number of micro-batches, for a mean we do not want.
            return lambda logits_1RV: (
                loss(pack, self._output(pack, logits_1RV, temperature)) * len(packs),
                {},
            )

        self._run(packs, train, forward_only=False)

    def _run(self, packs: list[Pack], reader: Callable[[Pack], Any], forward_only: bool) -> Any:
        def forward(packs_left: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
            pack = next(packs_left).to(self.device)
            return self._forward(model, pack), reader(pack)

        config = get_model_config(self.model)
        longest = max(len(pack.input_ids_T) for pack in packs)
        assert (
            config.variable_seq_lengths
            or parallel_state.get_pipeline_model_parallel_world_size() == 1
        )
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(packs),
            model=self.model,
            num_microbatches=len(packs),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward(self, model: torch.nn.Module, pack: Pack) -> Tensor:
        """Logits ``[1, R, V / tp]``, or the hidden states of an earlier stage."""
        self._predict_R = pack.predict_R
        if self._positions is not None:
            self._positions.position_ids_T = pack.position_ids_T
        sequences = sequences_of(pack, by_position=self._positions is not None)
        return model(
            pack.input_ids_T[None], pack.position_ids_T[None], None, packed_seq_params=sequences
        )

    def _keep_predicting(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_T1H, *others = inputs
        assert self._predict_R is not None
        hidden_R1H = hidden_T1H.index_select(0, self._predict_R)
        if self._see_hidden is not None:
            self._see_hidden(hidden_R1H)
        return (hidden_R1H, *others)

    def _output(
        self, pack: Pack, output_1RX: Tensor, temperature: float
    ) -> VocabParallelLogits | Tensor:
        if self._ends_in_values:
            return output_1RX[0, :, 0]
        return self._logits(pack, output_1RX, temperature)

    def _logits(self, pack: Pack, logits_1RV: Tensor, temperature: float) -> VocabParallelLogits:
        width = logits_1RV.shape[-1]
        return VocabParallelLogits(
            logits_1RV[0],
            pack.labels_R,
            vocab_start=parallel_state.get_tensor_model_parallel_rank() * width,
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=temperature,
        )


def _of_labels(output: VocabParallelLogits | Tensor) -> Tensor:
    """``[R]`` the labels' log-probabilities, or the values as they are."""
    return output if isinstance(output, Tensor) else output.read().logprobs_T
