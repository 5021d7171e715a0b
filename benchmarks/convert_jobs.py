"""This project's side of benchmarks/convert.py, and the floors: `cp`, plain safetensors."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.convert_memory import measuring
from benchmarks.convert_ranks import Prepared, on_ranks
from benchmarks.convert_server import serve
from megatron_bridge import live
from megatron_bridge.convert.memory import Meter
from megatron_bridge.convert.request import Request, default_workers
from megatron_bridge.convert.request import run as convert
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime import device, parallel

_GIB = 2**30
_MOST_WORKERS = 8


def written(destination: str, write: Callable[[], Any]) -> dict[str, Any]:
    """Time a write until its files are on the disk, whether the writer brings them there or not.

    The disk is idle before: nothing that was written or removed earlier is left to do.
    """
    target = Path(destination)
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    with measuring(os.getpid()) as measured:
        start, before = time.perf_counter(), sum(os.times()[:4])
        write()
        unsynced = time.perf_counter() - start
        for path in (*target.rglob("*"), target):
            _sync(path)
        used = sum(os.times()[:4]) - before
    return {
        "seconds": [measured.seconds],
        "unsynced_seconds": [unsynced],
        "cpu_seconds": [used],
        "peak_bytes": measured.peak_bytes,
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy(source: str, destination: str) -> dict[str, Any]:
    """`cp -r`."""
    return written(
        destination, lambda: subprocess.run(["cp", "-r", source, destination], check=True)
    )


def write(source: str, destination: str) -> dict[str, Any]:
    """`save_file` of tensors in memory, shard by shard."""
    shards = {}
    for path in _shards(source):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            shards[path.name] = {name: file.get_tensor(name).clone() for name in names}

    def save() -> None:
        Path(destination).mkdir()
        for name, tensors in shards.items():
            save_file(tensors, Path(destination, name))

    return written(destination, save)


def read(source: str, tp: int, pp: int, repeats: int) -> dict[str, Any]:
    """`safe_open` of everything, copied into tensors that are there already, as a model's are.

    The ranks share the tensors evenly.
    """

    def prepare() -> Prepared:
        mine = _share(source, dist.get_rank(), dist.get_world_size())
        held = {
            name: torch.empty(shape, dtype=torch.bfloat16)
            for shapes in mine.values()
            for name, shape in shapes.items()
        }

        def work() -> None:
            for path, names in mine.items():
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        held[name].copy_(file.get_tensor(name))

        return Prepared(work, list(held.values()))

    return on_ranks(tp * pp, prepare, repeats)


def _share(source: str, rank: int, world: int) -> dict[Path, dict[str, list[int]]]:
    """A rank's tensors with their shapes, by file, so that all ranks have about as many bytes."""
    everything = []
    for path in _shards(source):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                everything.append((file.get_slice(name).get_shape(), name, path))
    loads = [0] * world
    mine: dict[Path, dict[str, list[int]]] = {}
    for shape, name, path in sorted(everything, key=lambda one: -math.prod(one[0])):
        least = loads.index(min(loads))
        loads[least] += math.prod(shape)
        if least == rank:
            mine.setdefault(path, {})[name] = shape
    return mine


def slices(source: str, tp: int, pp: int, repeats: int) -> dict[str, Any]:
    """`safe_open` and `get_slice` of what each rank of the layout holds, into tensors as in `read`.

    What is cut by columns lies in the same pages for all ranks that share it: each has to map all
    of these.
    """

    def prepare() -> Prepared:
        layout = ParallelLayout(tp=tp, pp=pp)
        config = json.loads(Path(source, "config.json").read_text())
        place = layout.coordinates(dist.get_rank())
        layers = layout.stage_layers(config["num_hidden_layers"], place.pp)
        mine: dict[Path, dict[str, tuple[slice, ...]]] = {}
        held: dict[str, torch.Tensor] = {}
        for path in _shards(source):
            with safe_open(path, framework="pt") as file:
                for name in list(file.keys()):
                    if not _is_held(name, layers, place.pp, pp):
                        continue
                    cut = _cut(name, file.get_slice(name).get_shape(), place.tp, tp)
                    mine.setdefault(path, {})[name] = cut
                    shape = [index.stop - index.start for index in cut]
                    held[name] = torch.empty(shape, dtype=torch.bfloat16)

        def work() -> None:
            for path, cuts in mine.items():
                with safe_open(path, framework="pt") as file:
                    for name, cut in cuts.items():
                        held[name].copy_(file.get_slice(name)[cut])

        return Prepared(work, list(held.values()))

    return on_ranks(tp * pp, prepare, repeats)


def _is_held(name: str, layers: range, stage: int, stages: int) -> bool:
    """Whether a pipeline stage holds a HuggingFace tensor; neither model's embeddings are tied."""
    if name.startswith("model.layers."):
        return int(name.split(".")[2]) in layers
    return stage == (0 if name.startswith("model.embed") else stages - 1)


def _cut(name: str, shape: list[int], place: int, tp: int) -> tuple[slice, ...]:
    """A tensor parallel rank's part: columns of projections back, rows of the others."""
    whole = [slice(0, size) for size in shape]
    if len(shape) > 1 and not name.endswith("mlp.gate.weight"):
        axis = int(name.endswith(("o_proj.weight", "down_proj.weight")))
        part = shape[axis] // tp
        whole[axis] = slice(part * place, part * (place + 1))
    return tuple(whole)


def load(source: str, tp: int, pp: int, repeats: int) -> dict[str, Any]:
    """`live.load_weights` onto a live model."""

    def prepare() -> Prepared:
        model = build(source, tp, pp)
        return Prepared(lambda: live.load_weights(model, source), list(model.parameters()))

    return on_ranks(tp * pp, prepare, repeats)


def build(source: str, tp: int, pp: int) -> torch.nn.Module:
    """A rank's live model, its weights not set yet."""
    layout = ParallelLayout(tp=tp, pp=pp)
    parallel.initialize(layout)
    return live.build_model(
        live.load_hf_config(source), layout, dtype=torch.bfloat16, perform_initialization=False
    )


def to_megatron(source: str, destination: str, memory: int = 4 * _GIB) -> dict[str, Any]:
    """`python -m megatron_bridge convert`, after its imports."""
    return _convert(source, destination, memory, shard_bytes=None)


def to_huggingface(source: str, destination: str, memory: int = 4 * _GIB) -> dict[str, Any]:
    """The way back."""
    return _convert(source, destination, memory, shard_bytes=_GIB)


def command(source: str, destination: str) -> dict[str, Any]:
    """The command as a user gives it: with the interpreter's start and all imports."""
    given = [sys.executable, "-m", "megatron_bridge", "convert", source, destination]
    done = written(destination, lambda: subprocess.run(given, check=True, stdout=sys.stderr))
    return done | {"peak_bytes": None}  # the interpreter's own would count


def compare(source: str, destination: str) -> dict[str, Any]:
    """Whether two HuggingFace folders hold the same tensors, bit for bit."""
    one, other = _tensors(source), _tensors(destination)
    wrong = [
        name
        for name in one.keys() | other.keys()
        if name not in one
        or name not in other
        or not torch.equal(_bits(one[name]), _bits(other[name]))
    ]
    return {"wrong": sorted(wrong)}


def _tensors(folder: str) -> dict[str, torch.Tensor]:
    found = {}
    for path in _shards(folder):
        found |= load_file(path)
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def _convert(source: str, destination: str, memory: int, shard_bytes: int | None) -> dict[str, Any]:
    request = Request(
        source=Path(source),
        destination=Path(destination),
        to=None,
        parallel=None,
        dtype=None,
        memory=memory,
        workers=default_workers(_MOST_WORKERS),
        shard_bytes=shard_bytes,
        adapter=None,
        config=None,
        resume=False,
        overwrite=False,
    )
    told = []
    found = written(destination, lambda: told.append(convert(request, Meter())))
    return found | {"peak_bytes": max(found["peak_bytes"], told[0].result.peak)}


def _shards(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


JOBS = {
    "copy": copy,
    "write": write,
    "read": read,
    "slices": slices,
    "load": load,
    "to_megatron": to_megatron,
    "to_huggingface": to_huggingface,
    "command": command,
    "compare": compare,
}


def import_all() -> None:
    """What jobs import on the way, so that no job's time holds it."""
    torch.set_num_threads(1)
    device.prepare()
    import megatron.core.models.gpt  # noqa: F401

    import megatron_bridge.runtime.specs  # noqa: F401
    import megatron_bridge.torch_dist.reader  # noqa: F401


if __name__ == "__main__":
    import_all()
    serve(JOBS)
