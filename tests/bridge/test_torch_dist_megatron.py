"""Stock Megatron models and checkpoints: what it saves we read, what we write it loads."""

import queue
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.source import Ranges, TensorInfo, whole
from megatron_bridge.torch_dist.reader import TorchDist
from megatron_bridge.torch_dist.writer import ChunkFile, ChunkRecord, finish
from tests.ranks import run_ranks

VOCABULARY = 56
Shards = list[tuple[str, Ranges, Tensor]]


@dataclass(frozen=True)
class Case:
    """A model and the ranks that hold it."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    experts: int | None = None
    vocabulary: int = VOCABULARY

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.ep


def _model(case: Case) -> torch.nn.Module:
    """This rank's part of a GPTModel of Megatron's own layers, all dimensions distinct."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.tp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(dist.get_rank(), force_reset_rng=True)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=10,
        ffn_hidden_size=44,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        normalization="RMSNorm",
        num_moe_experts=case.experts,
        moe_ffn_hidden_size=16 if case.experts else None,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        case.experts, qk_layernorm=True, normalization="RMSNorm"
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=case.vocabulary,
        max_sequence_length=32,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).bfloat16()
    for name, parameter in model.named_parameters():
        if "norm" in name or "router" in name:
            parameter.data = parameter.data.float()
        torch.nn.init.normal_(parameter)
    return model


def _shards(model: torch.nn.Module, *, main: bool) -> Shards:
    """What this rank holds of the checkpoint's tensors; with ``main`` only what it would save."""
    from megatron.core.dist_checkpointing import ShardedTensor, mapping
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    state = model.sharded_state_dict()  # type: ignore[operator]
    mapping.apply_factories(state)
    found = []
    for shard in nested_values(state):
        if (
            not isinstance(shard, ShardedTensor)
            or main
            and not mapping.is_main_replica(shard.replica_id)
        ):
            continue
        sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        ranges = tuple((a, a + n) for a, n in zip(shard.global_offset, sizes, strict=True))
        found.append((shard.key, ranges, shard.data.detach().reshape(sizes).clone()))
    return found


def _save(folder: Path, case: Case) -> Shards:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # By default Megatron starts a process for this queue, which imports the test runner again. A
    # save that is not asynchronous stays in this process.
    filesystem_async._results_queue = queue.Queue()
    model = _model(case)
    state = {"model": model.sharded_state_dict(), "iteration": 3}  # type: ignore[operator]
    dist_checkpointing.save(state, str(folder), content_metadata={"kind": "test"})
    return _shards(model, main=True)


def _load(folder: Path, case: Case) -> tuple[Shards, dict[str, Any]]:
    from megatron.core import dist_checkpointing

    model = _model(case)
    state = {"model": model.sharded_state_dict()}  # type: ignore[operator]
    loaded = dist_checkpointing.load(state, str(folder), strict="raise_unexpected")
    assert isinstance(loaded, dict)
    model.load_state_dict(loaded.pop("model"))
    names = dist_checkpointing.load_tensors_metadata(str(folder))
    assert {key for key, _, _ in _shards(model, main=False)} <= set(names)
    assert dist_checkpointing.serialization.load_content_metadata(str(folder)) == {"cut": "rows"}
    return _shards(model, main=False), loaded


DENSE = Case(tp=2, pp=2)
MOE = Case(pp=2, ep=2, experts=4)


@pytest.fixture(scope="module", params=[DENSE, MOE], ids=["dense", "moe"])
def saved(request, tmp_path_factory) -> tuple[Case, Path, Shards]:
    """A checkpoint that Megatron saved, and what its ranks held."""
    folder = tmp_path_factory.mktemp("megatron")
    ranks = run_ranks(_save, request.param.world, folder, request.param)
    return request.param, folder, [shard for rank in ranks for shard in rank]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def test_what_megatron_saved_is_read_bit_for_bit(saved):
    case, folder, shards = saved
    checkpoint = TorchDist(folder)
    checkpoint.check()
    assert {key for key, _, _ in shards} == set(checkpoint.tensors())
    for key, ranges, tensor in shards:
        assert _same(checkpoint.read(key, ranges), tensor), key
    for key, info in checkpoint.tensors().items():
        complete = torch.zeros(info.shape, dtype=info.dtype)
        for other, ranges, tensor in shards:
            if other == key:
                complete[tuple(slice(*pair) for pair in ranges)] = tensor
        assert _same(checkpoint.read(key, whole(info.shape)), complete), key
    dtypes = {info.dtype for info in checkpoint.tensors().values()}
    assert dtypes == {torch.bfloat16, torch.float32}
    assert checkpoint.common() == {"iteration": 3, "content_metadata": {"kind": "test"}}
    module = "mlp.experts.experts.linear_fc1" if case.experts else "mlp.linear_fc1"
    assert any(f"{module}._extra_state" in name for name in checkpoint.objects())


def _cut(shape: tuple[int, ...]) -> list[Ranges]:
    """Pieces that no layout asks for: whole layers and experts, the last dimension in unequal
    parts."""
    if not shape:
        return [()]
    parts = [(0, 7), (7, shape[-1])] if shape[-1] > 7 else [(0, shape[-1])]
    return [(*whole(shape[:-1]), part) for part in parts]


def _write(folder: Path, source: TorchDist) -> None:
    infos: Mapping[str, TensorInfo] = source.tensors()
    records: list[ChunkRecord] = []
    for worker in range(2):
        with ChunkFile(folder / f"__{worker}_0.distcp") as file:
            for key in list(infos)[worker::2]:
                for ranges in _cut(infos[key].shape):
                    offsets = [start for start, _ in ranges]
                    records.append(file.add(key, offsets, source.read(key, ranges)))
    finish(folder, infos, records, {"content_metadata": {"cut": "rows"}})


LAYOUTS = {
    "dense": [Case(), Case(tp=2), Case(pp=2), Case(vocabulary=64), Case(tp=2, vocabulary=48)],
    "moe": [Case(experts=4), Case(pp=2, ep=2, experts=4)],
}


def test_what_we_write_megatron_loads(saved, tmp_path):
    case, folder, _ = saved
    source = TorchDist(folder)
    _write(tmp_path, source)
    for layout in LAYOUTS["moe" if case.experts else "dense"]:
        for shards, common in run_ranks(_load, layout.world, tmp_path, layout):
            assert common["iteration"] == 0
            assert common["checkpoint_version"] == 3.0
            for key, ranges, tensor in shards:
                expected = _padded(source, key, ranges)
                assert _same(tensor, expected), (asdict(layout), key)


def _padded(source: TorchDist, key: str, ranges: Ranges) -> Tensor:
    """The rectangle, with zeros where a vocabulary ends sooner than the model's."""
    shape = source.tensors()[key].shape
    inside = tuple((min(a, size), min(b, size)) for (a, b), size in zip(ranges, shape, strict=True))
    padded = torch.zeros([b - a for a, b in ranges], dtype=source.tensors()[key].dtype)
    part = source.read(key, inside)
    padded[tuple(slice(0, size) for size in part.shape)] = part
    return padded
