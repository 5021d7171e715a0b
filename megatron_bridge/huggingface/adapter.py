"""A checkpoint with a LoRA adapter merged, rectangle by rectangle, to the numbers of PEFT.

PEFT multiplies the factors in float32 (float64 for float64 weights), adds the product to the weight
and rounds once. A read takes the result and a few MiB besides; of DoRA, which needs the norm of
whole rows, 128 rows in float32 three times.
"""

import difflib
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron_bridge.huggingface import adapter_config
from megatron_bridge.huggingface.adapter_config import AdapterConfig
from megatron_bridge.huggingface.folder import WeightFile, open_weights, read_json
from megatron_bridge.huggingface.lora import Lora, Replaced
from megatron_bridge.huggingface.safetensors_file import listed
from megatron_bridge.huggingface.stamps import Stamps
from megatron_bridge.source import Ranges, Source, TensorInfo, whole

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
# What an adapter holds of a module, by the end of the tensor's name.
_LINEAR = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
_MAGNITUDE = ".lora_magnitude_vector"
_SUFFIXES = (*_LINEAR, *_EMBEDDING, _MAGNITUDE)
# A layer that LoRA wraps, saved along (embeddings are, where the vocabulary may have grown).
_WRAPPED = ".base_layer."
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"


def with_adapter(source: Source, folder: str | Path) -> "Merged":
    """``source`` with the PEFT adapter in ``folder`` merged into it.

    Names, shapes and dtypes stay. Merged are LoRA on linear layers and embeddings, rsLoRA, DoRA on
    linear layers, ranks and alphas by pattern, and modules saved whole.

    Args:
        source: the plain (dequantised) tensors of the model that the adapter was trained on.
        folder: adapter_config.json and adapter_model.safetensors (or .bin).

    Raises:
        ValueError: when the adapter is damaged, of a kind that is not merged, or does not fit the
            model; all tensors that do not fit are named at once.
    """
    folder = Path(folder)
    config = adapter_config.parse(read_json(folder / _CONFIG))
    path = next((folder / name for name in _WEIGHTS if (folder / name).exists()), None)
    if path is None:
        raise ValueError(f"{folder} has no {' or '.join(_WEIGHTS)}")
    stamps = Stamps((folder / _CONFIG, path))
    changes = _Finder(source, open_weights(path), config).changes()
    return Merged(source, changes, stamps)


class Merged:
    """A source some of whose tensors an adapter changes."""

    def __init__(
        self, source: Source, changes: Mapping[str, Lora | Replaced], stamps: Stamps
    ) -> None:
        self._source = source
        self._changes = changes
        self._stamps = stamps

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, as the source has it."""
        return self._source.tensors()

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """The rectangle ``ranges`` of one tensor, merged."""
        change = self._changes.get(name)
        return self._source.read(name, ranges) if change is None else change.read(ranges)

    def check_unchanged(self) -> None:
        """Make sure that the adapter's files are as they were (the source looks after its own).

        Raises:
            ValueError: naming the files that changed.
        """
        self._stamps.check()


class _Finder:
    """Pairs what the adapter holds with the model's tensors."""

    def __init__(self, source: Source, file: WeightFile, config: AdapterConfig) -> None:
        self._source = source
        self._model = source.tensors()
        self._file = file
        self._config = config
        self._faults: list[str] = []

    def changes(self) -> dict[str, Lora | Replaced]:
        """The changed tensors by name."""
        layers, saved = self._sorted()
        found: dict[str, Lora | Replaced] = {}
        for name, held in saved.items():
            if self._fits(held, name, self._file.infos[held].shape):
                found[name] = Replaced(self._model[name], partial(self._file.read, held))
        for module, parts in layers.items():
            name = f"{module}.weight"
            change = self._lora(module, name, parts, found.get(name))
            if change is not None:
                found[name] = change
        if not self._faults and not found:
            self._faults.append("it holds no tensors")
        if self._faults:
            raise ValueError(f"{self._file.path} does not fit: {listed(self._faults)}")
        return found

    def _sorted(self) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """Names in the adapter: by module and part for LoRA, by the model's name for others."""
        layers: dict[str, dict[str, str]] = {}
        saved: dict[str, str] = {}
        for held in self._file.infos:
            name = held.removeprefix(_PREFIX)
            suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
            if name == held:
                self._faults.append(f"'{held}' does not start with '{_PREFIX}'")
            elif suffix:
                layers.setdefault(name.removesuffix(suffix), {})[suffix] = held
            elif _WRAPPED in name:
                saved[name.replace(_WRAPPED, ".")] = held
            elif not self._config.saves(name.rpartition(".")[0]):
                self._faults.append(f"'{held}' is neither LoRA nor named in modules_to_save")
            elif name.endswith(_EMBEDDINGS) and not any(n.endswith(_HEAD) for n in self._model):
                self._faults.append(
                    f"'{held}' replaces embeddings that this model shares with its head; the "
                    "adapter was trained with two copies, and one cannot hold both"
                )
            else:
                saved[name] = held
        return layers, saved

    def _lora(
        self, module: str, name: str, parts: Mapping[str, str], base: Lora | Replaced | None
    ) -> Lora | None:
        """The change of one layer's weight; None and a fault where it does not fit."""
        embedding = _EMBEDDING[0] in parts or _EMBEDDING[1] in parts
        wanted: set[str] = set(_EMBEDDING if embedding else _LINEAR)
        if self._config.dora:
            wanted.add(_MAGNITUDE)
        if parts.keys() != wanted:
            told = ", ".join(sorted(suffix[1:] for suffix in parts.keys() ^ wanted))
            self._faults.append(f"'{module}' lacks or must not have: {told}")
            return None
        if embedding and self._config.dora:
            self._faults.append(f"'{module}': DoRA of an embedding is not merged")
            return None
        if not self._config.targets(module):
            self._faults.append(f"'{module}' is not among target_modules")
            return None
        a, b = (self._tensor(parts[suffix]) for suffix in (_EMBEDDING if embedding else _LINEAR))
        transposed = embedding or self._config.transposed
        magnitude = self._tensor(parts[_MAGNITUDE]) if self._config.dora else None
        if not self._factors_fit(module, name, (a, b, magnitude), transposed):
            return None
        info = self._model[name]
        read = base.read if base is not None else partial(self._source.read, name)
        scale = self._config.scale_of(module)
        return Lora(info, read, a, b, scale, transposed, embedding, magnitude)

    def _factors_fit(
        self,
        module: str,
        name: str,
        factors: tuple[Tensor, Tensor, Tensor | None],
        transposed: bool,
    ) -> bool:
        a, b, magnitude = factors
        rank = self._config.rank_of(module)
        if a.dim() != 2 or b.dim() != 2 or (a.shape[0], b.shape[1]) != (rank, rank):
            self._faults.append(
                f"'{module}' has factors {tuple(a.shape)} and {tuple(b.shape)}; the config says "
                f"rank {rank}"
            )
            return False
        if magnitude is not None and (transposed or magnitude.shape != b.shape[:1]):
            self._faults.append(f"'{module}' has a magnitude of {tuple(magnitude.shape)}")
            return False
        shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
        return self._fits(module, name, shape)

    def _fits(self, held: str, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the model has a floating-point tensor of this name and shape."""
        info = self._model.get(name)
        if info is None:
            self._faults.append(f"'{held}' is of no tensor of the model{self._nearest(name)}")
        elif info.shape != shape:
            self._faults.append(f"'{held}' makes {shape}, but '{name}' has shape {info.shape}")
        elif info.dtype.itemsize < 2 or not info.dtype.is_floating_point:
            self._faults.append(f"'{name}' is {info.dtype}, into which nothing can be merged")
        return info is not None and info.shape == shape

    def _tensor(self, held: str) -> Tensor:
        return self._file.read(held, whole(self._file.infos[held].shape))

    def _nearest(self, name: str) -> str:
        """A name like it, looked for among names that differ in more than a number."""
        alike = {re.sub(r"\d+", "0", known): known for known in reversed(list(self._model))}
        near = difflib.get_close_matches(re.sub(r"\d+", "0", name), alike, 1, 0.0)
        return f"; did you mean '{alike[near[0]]}'?" if near else ""
