"""Opens a checkpoint of any kind as HuggingFace tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge import engine_files, translation
from megatron_bridge.agreement import check_keys, check_tensors
from megatron_bridge.convert.kinds import COMPANIONS, Kind, files_of, kind_of
from megatron_bridge.huggingface.adapter import with_adapter
from megatron_bridge.huggingface.folder import HuggingFaceFolder, read_json
from megatron_bridge.huggingface.quantized import dequantized, plain_config
from megatron_bridge.mappings import huggingface_shapes
from megatron_bridge.prefetch import Prefetched
from megatron_bridge.registry import HfConfig
from megatron_bridge.source import Ranges, Source, TensorInfo
from megatron_bridge.torch_dist import reader
from megatron_bridge.views import MegatronAsHuggingFace

CARRIED = "huggingface."
"""Begins the key of a HuggingFace tensor that a Megatron checkpoint carries along unread."""
_OWN_DTYPE = (".inv_freq", ".e_score_correction_bias", ".expert_bias")
"""Buffers that every loader keeps in float32."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint, whatever its kind, as HuggingFace tensors.

    Attributes:
        kind: what it is on the disk.
        source: tensors by their HuggingFace names.
        config: config.json.
        carried: names of tensors that the architecture's table passes over.
        companions: the folder with config.json, tokenizer and the like.
        paths: what was opened; for the list of files.
        entries: tensors and chunks that the files hold.
    """

    kind: Kind
    source: Source
    config: HfConfig
    carried: tuple[str, ...]
    companions: Path
    paths: tuple[Path, ...]
    entries: int

    def files(self) -> list[Path]:
        """Every file that decides the tensors."""
        return [file for path in self.paths for file in files_of(path)]


def open_checkpoint(
    path: Path,
    *,
    config: Path | None = None,
    adapter: Path | None = None,
    dtype: torch.dtype | None = None,
    needs_table: bool = True,
) -> Opened:
    """Open a HuggingFace or Megatron folder.

    Args:
        path: the folder.
        config: the HuggingFace folder whose config.json and tokenizer belong to a Megatron
            checkpoint that brings none.
        adapter: a PEFT adapter to merge.
        dtype: cast all tensors but buffers that stay in float32; None: each keeps its own.
        needs_table: False: a HuggingFace folder may be of an architecture that the bridge does not
            know; then its tensors are taken as they are.

    Raises:
        ValueError: when it cannot be read, or tensors and config.json disagree.
    """
    kind = kind_of(path)
    if kind is Kind.MEGATRON:
        opened = _open_megatron(path, config)
    elif kind is Kind.ENGINE:
        opened = _open_engine(path, config)
    elif kind is Kind.HUGGINGFACE:
        if config is not None:
            raise ValueError(f"--config is for Megatron checkpoints; {path} has its own")
        opened = _open_huggingface(path, dtype, needs_table)
    else:
        raise ValueError(_WHY_NOT[kind].format(path=path))
    return _changed(opened, adapter, dtype)


def _changed(opened: Opened, adapter: Path | None, dtype: torch.dtype | None) -> Opened:
    """With an adapter merged, as PEFT does in the weights' own dtype, then cast."""
    source, config, paths = opened.source, opened.config, opened.paths
    if adapter is not None:
        if not (adapter / "adapter_config.json").is_file():
            raise ValueError(f"{adapter} is no adapter: it has no adapter_config.json")
        source, paths = with_adapter(source, adapter), (*paths, adapter)
    if dtype is not None:
        source = Cast(source, dtype)
        fields = config.keys() & {"dtype", "torch_dtype"} or {"dtype"}
        config = {**config, **dict.fromkeys(fields, str(dtype).removeprefix("torch."))}
    return replace(opened, source=source, config=config, paths=paths)


_WHY_NOT = {
    Kind.ADAPTER: "{path} is an adapter: give its base model as SRC and it as --adapter",
    Kind.FILE: "{path} is a single file: give the folder with its config.json",
}


def _open_huggingface(path: Path, dtype: torch.dtype | None, needs_table: bool) -> Opened:
    folder = HuggingFaceFolder(path)
    config = folder.config()
    base = Prefetched(folder)
    # Cast does the rest: it tells when float16 cannot hold a number.
    plain = torch.float32 if dtype is torch.float16 else dtype or torch.bfloat16
    source = dequantized(base, config, plain)
    if source is not base:
        config = plain_config(config, plain)
    carried: tuple[str, ...] = ()
    if needs_table or _supported(config):
        resolved = translation.resolve(config)
        expected = huggingface_shapes(resolved)
        check_tensors(source, resolved, expected, path)
        carried = tuple(name for name in source.tensors() if name not in expected)
    return Opened(Kind.HUGGINGFACE, source, config, carried, path, (path,), len(folder.tensors()))


def _supported(config: HfConfig) -> bool:
    try:
        return not translation.problems(config)
    except ValueError:
        return False


def _open_megatron(path: Path, config_folder: Path | None) -> Opened:
    folder = reader.find(path)
    assert folder is not None
    companions = config_folder or folder.parent / COMPANIONS
    if not (companions / "config.json").is_file():
        if config_folder is not None:
            raise ValueError(f"--config {config_folder} is no folder with a config.json")
        raise ValueError(
            f"{path} does not say which model it is: give the HuggingFace folder with its "
            "config.json and tokenizer as --config"
        )
    config = read_json(companions / "config.json")
    opened = reader.TorchDist(folder)
    checkpoint = Prefetched(opened)
    view = MegatronAsHuggingFace(checkpoint, config)
    check_keys(checkpoint.tensors(), translation.resolve(config), path)
    extra = [key for key in checkpoint.tensors() if key.startswith(CARRIED)]
    carried = tuple(key.removeprefix(CARRIED) for key in extra)
    source = Together((view, Renamed(checkpoint, dict(zip(carried, extra, strict=True)))))
    paths = (path,) if config_folder is None else (path, config_folder)
    entries = len(source.tensors()) + sum(len(opened.chunks(key)) for key in opened.tensors())
    return Opened(Kind.MEGATRON, source, config, carried, companions, paths, entries)


def _open_engine(path: Path, config_folder: Path | None) -> Opened:
    told = engine_files.description(path)
    model = told.get("model")
    companions = config_folder or Path(model or "/nonexistent")
    if not (companions / "config.json").is_file():
        where = f"at {config_folder or model}" if config_folder or model else "told by it"
        raise ValueError(
            f"the model that {path} was trained from is not {where}: give the HuggingFace folder "
            "with its config.json and tokenizer as --config"
        )
    config = engine_files.config_of(told, read_json(companions / "config.json"))
    checkpoint = engine_files.EngineFiles(path, config)
    source = MegatronAsHuggingFace(Prefetched(checkpoint), config)
    entries = len(source.tensors())
    return Opened(Kind.ENGINE, source, config, (), companions, (path, companions), entries)


class Renamed:
    """Some tensors of a source under other names.

    Args:
        source: where they are.
        names: new name -> name there.
    """

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names
        self._infos = {new: source.tensors()[old] for new, old in names.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by their new names."""
        return self._infos

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """A rectangle of one."""
        return self._source.read(self._names[name], ranges)


class Together:
    """Several sources with different names as one."""

    def __init__(self, sources: tuple[Source, ...]) -> None:
        self._home = {name: source for source in sources for name in source.tensors()}
        self._infos = {n: info for source in sources for n, info in source.tensors().items()}
        assert len(self._infos) == sum(len(source.tensors()) for source in sources)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, source by source."""
        return self._infos

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """A rectangle of one."""
        return self._home[name].read(name, ranges)


class Cast:
    """A source in another dtype: all floating-point tensors but those that stay in float32."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._source = source
        self._infos = {
            name: TensorInfo(_cast(name, info.dtype, dtype), info.shape)
            for name, info in source.tensors().items()
        }

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, with their new dtypes."""
        return self._infos

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """A rectangle of one, cast.

        Raises:
            ValueError: when the dtype cannot hold a number: infinity instead would ruin the model.
        """
        held = self._source.read(name, ranges)
        cast = held.to(self._infos[name].dtype)
        if cast.is_floating_point() and cast.dtype != held.dtype and _has_odd(cast):
            lost = cast.isinf() & held.isfinite()
            if lost.any():
                raise ValueError(_overflow(name, held[lost], cast.dtype))
        return cast


def _has_odd(tensor: Tensor) -> bool:
    """Whether it has infinities or NaNs; takes no memory."""
    return tensor.numel() > 0 and not all(end.isfinite() for end in tensor.aminmax())


def _overflow(name: str, lost: Tensor, dtype: torch.dtype) -> str:
    told = str(dtype).removeprefix("torch.")
    return (
        f"'{name}' has numbers up to {float(lost.abs().max()):.6g}, and {told} ends at "
        f"{torch.finfo(dtype).max:.6g}: they would become infinite; choose another --dtype "
        "(bfloat16 reaches as far as float32)"
    )


def _cast(name: str, held: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    return wanted if held.is_floating_point and not name.endswith(_OWN_DTYPE) else held
