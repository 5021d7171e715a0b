"""The model's folder: config, tokenizer, weights, and whether the layouts can cut it."""

import json
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hybridflow.recipe.assets import how_to_make
from hybridflow.recipe.checks.context import Check, Context, missing_sizes
from hybridflow.recipe.faults import Fault

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHT_TYPES = ("F32", "BF16", "F16")
QUANTIZED_TYPES = ("F8_E4M3", "F8_E8M0", "U8")
"""Of FP8 and MXFP4 weights and their scales."""
MAX_HEADER = 100 * 1024 * 1024
INDEX = "model.safetensors.index.json"


def folder_faults(context: Context) -> Iterator[Fault]:
    """Files that must be in the folder."""
    folder = context.model_folder
    if folder is None:
        what = f"there is no model folder {context.recipe.model.path}"
        fix = how_to_make(context.recipe.model.path, "make or download the model")
        yield context.fault("model.path", what, f"{fix}, or mend the path")
        return
    yield from _config_faults(context, folder / "config.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        what = f"{folder} holds no tokenizer"
        yield context.fault("model.path", what, f"add one of {', '.join(TOKENIZER_FILES)}")
    yield from _weight_faults(context, folder)


def _config_faults(context: Context, path: Path) -> Iterator[Fault]:
    from megatron_bridge.mappings import huggingface_shapes
    from megatron_bridge.registry import architecture
    from megatron_bridge.translation import problems, resolve

    if not path.is_file():
        what = f"{path.parent} holds no config.json"
        yield context.fault("model.path", what, "give a folder in HuggingFace format")
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        yield Fault(str(path), f"not valid JSON: {error}", "restore the file")
        return
    if not isinstance(config, dict):
        yield Fault(str(path), "not a JSON object", "restore the file")
        return
    if missing := missing_sizes(config):
        what = f"{', '.join(missing)} must be positive integers"
        yield Fault(str(path), what, "restore the file")
        return
    try:
        architecture(config)
    except ValueError as error:
        yield context.fault("model.path", str(error), "choose a model of a known architecture")
        return
    if unsupported := problems(config):
        for problem in unsupported:
            yield Fault(str(path), problem, "choose a model that the bridge can build")
        return
    yield from _tensor_faults(context, path.parent, huggingface_shapes(resolve(config)))


def _weight_files(folder: Path) -> list[Path]:
    """Files of the index, else every safetensors file."""
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _inside(path: Path, folder: Path) -> bool:
    """Whether an index's file is in the folder itself; it may be a link into a cache."""
    return path.parent.resolve() == folder.resolve()


def _weight_faults(context: Context, folder: Path) -> Iterator[Fault]:
    files = _weight_files(folder)
    if not files:
        broken = (folder / INDEX).is_file()
        what = f"{INDEX} has no weight_map" if broken else f"{folder} holds no *.safetensors"
        yield context.fault("model.path", what, "save the model with safe_serialization")
    for path in files:
        if not _inside(path, folder):
            yield Fault(str(folder / INDEX), f"'{path}' is outside the folder", "mend the index")
        elif not path.is_file():
            yield Fault(str(folder / INDEX), f"{path.name} is missing", "copy the whole model")
        elif problem := read_header(path)[1]:
            yield Fault(str(path), problem, "copy or download the file again")


@cache
def _cached_header(path: Path, size: int, changed: int) -> tuple[dict[str, Any], str | None]:
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            return {}, "truncated: the safetensors header is not whole"
        raw = file.read(length)
    try:
        header = json.loads(raw)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        types = {entry["dtype"] for entry in tensors.values()}
        _ = [tuple(entry["shape"]) for entry in tensors.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return {}, "the safetensors header is not valid"
    if 8 + length + end != size:
        return tensors, f"truncated: {size} bytes where its header says {8 + length + end}"
    if unknown := sorted(types - {*WEIGHT_TYPES, *QUANTIZED_TYPES}):
        return tensors, f"weights of type {', '.join(unknown)}; known: {', '.join(WEIGHT_TYPES)}"
    return tensors, None


def read_header(path: Path) -> tuple[dict[str, Any], str | None]:
    """Tensors of a safetensors file by name (``dtype``, ``shape``), and what is wrong with it."""
    stat = path.stat()
    return _cached_header(path, stat.st_size, stat.st_mtime_ns)


def _tensor_faults(
    context: Context, folder: Path, wanted: dict[str, tuple[int, ...]]
) -> Iterator[Fault]:
    """Tensors of the architecture that the files lack or hold in another shape."""
    files = [path for path in _weight_files(folder) if path.is_file() and _inside(path, folder)]
    headers = [read_header(path) for path in files]
    if not files or any(problem for _, problem in headers):
        return
    shapes = {n: tuple(entry["shape"]) for found, _ in headers for n, entry in found.items()}
    # An MXFP4 tensor is stored as two, of other shapes.
    missing = [name for name in wanted if name not in shapes and f"{name}_blocks" not in shapes]
    wrong = [n for n in wanted if n in shapes and shapes[n] != wanted[n]]
    if missing:
        what = f"{folder} lacks {len(missing)} tensors: {_some(missing)}"
        yield context.fault("model.path", what, "copy the whole model")
    if wrong:
        name = wrong[0]
        what = (
            f"{len(wrong)} tensors do not fit config.json: {name} is {list(shapes[name])}, "
            f"not {list(wanted[name])}"
        )
        yield context.fault("model.path", what, "use the config.json of these weights")


def has_separate_head(folder: Path) -> bool:
    """Whether the files hold a value head beside a causal model, as TRL saves it."""
    files = [path for path in _weight_files(folder) if path.is_file() and _inside(path, folder)]
    return any("v_head.summary.weight" in read_header(path)[0] for path in files)


def quantized_faults(context: Context) -> Iterator[Fault]:
    """FP8 and MXFP4 weights: the trainer reads them as what they stand for, rollouts do not."""
    folder, config = context.model_folder, context.hf_config
    if folder is None or config is None or not is_known(config):
        return
    files = [path for path in _weight_files(folder) if path.is_file() and _inside(path, folder)]
    entries = [entry for path in files for entry in read_header(path)[0].values()]
    types = sorted({entry["dtype"] for entry in entries} & set(QUANTIZED_TYPES))
    if not types:
        return
    what = f"{folder} holds weights of type {', '.join(types)}"
    if not config.get("quantization_config"):
        what = f"{what}, and its config.json has no quantization_config"
        yield context.fault("model.path", what, "copy or download config.json again")
    elif "rollout" in context.plan.roles:
        fix = f"make a bfloat16 model: hybridflow convert {folder} {folder}-bf16 --to huggingface"
        yield context.fault("model.path", f"{what}, and rollouts take plain ones", fix)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def is_known(config: dict[str, Any]) -> bool:
    """Whether the bridge can say how such a model is cut; ``folder_faults`` reports why not."""
    from megatron_bridge.registry import architecture
    from megatron_bridge.translation import problems

    try:
        architecture(config)
    except ValueError:
        return False
    return not problems(config)


def layout_faults(context: Context) -> Iterator[Fault]:
    """Layouts that do not divide the model's heads, layers, feed-forward size or experts."""
    config = context.hf_config
    if config is None or not is_known(config):
        return
    for role, layout in context.plan.layouts.items():
        section = context.models.get(role)
        if section is None or section.parallel is None or getattr(section, "model", None):
            continue  # it has the actor's layout, which is reported there, or a model of its own
        for problem in layout.problems(config):
            what, _, fix = problem.partition("; ")
            yield context.fault(f"roles.{role}.parallel", f"roles.{role}: {what}", fix)


def length_faults(context: Context) -> Iterator[Fault]:
    """Prompts and responses that do not fit the model's positions."""
    config, recipe = context.hf_config, context.recipe
    positions = (config or {}).get("max_position_embeddings")
    if recipe.roles.rollout is None:
        return
    prompt, response = recipe.data.max_prompt_tokens, recipe.roles.rollout.sampling.max_tokens
    if isinstance(positions, int) and prompt + response > positions:
        what = (
            f"data.max_prompt_tokens {prompt} + max_tokens {response} exceed the model's "
            f"{positions} positions"
        )
        yield context.fault("roles.rollout.sampling.max_tokens", what, "lower one of the two")


def vocabulary_faults(context: Context) -> Iterator[Fault]:
    """Models whose log-probabilities are compared token by token, with other tokens."""
    recipe = context.recipe
    kinds, ours = recipe.roles.kinds(), _vocabulary(Path(recipe.model.path))
    for role, section in recipe.roles.models().items():
        folder = getattr(section, "model", None)
        if folder is None or kinds[role] != "model" or role not in context.plan.roles:
            continue
        theirs = _vocabulary(Path(folder))
        if ours is None or theirs is None or ours == theirs:
            continue
        differing = sorted({token for token, _ in set(ours.items()) ^ set(theirs.items())})
        what = (
            f"{folder} has another vocabulary than {recipe.model.path}: {len(differing)} tokens "
            f"differ, such as {differing[0]!r}"
        )
        fix = "its log-probabilities are of the same token ids: use a model with the same tokenizer"
        yield context.fault(f"roles.{role}.model", what, fix)


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Ids of a tokenizer's tokens; None where they stand in no tokenizer.json."""
    try:
        told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        listed = told["model"]["vocab"]
        tokens = (
            dict(listed)
            if isinstance(listed, dict)
            else {entry[0]: place for place, entry in enumerate(listed)}
        )
        return tokens | {entry["content"]: entry["id"] for entry in told.get("added_tokens", [])}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


PARALLEL = ("roles.actor.parallel", "roles.reference", "roles.critic")

CHECKS = (
    Check(("model.path",), folder_faults),
    Check(("model.path", "dataflow", "warm_start.dataflow"), quantized_faults),
    Check(("model.path", "dataflow", "warm_start.dataflow", *PARALLEL), layout_faults),
    Check(("model.path", "dataflow", "warm_start.dataflow", "roles"), vocabulary_faults),
    Check(
        ("model.path", "data.max_prompt_tokens", "roles.rollout.sampling.max_tokens"),
        length_faults,
    ),
)
