"""Says what a checkpoint is, from its headers alone."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_bridge import engine_files, translation
from megatron_bridge.convert.kinds import COMPANIONS, Kind, adapter_weights, kind_of
from megatron_bridge.convert.megatron_sink import layout_of
from megatron_bridge.convert.sizes import show_bytes
from megatron_bridge.huggingface.folder import HuggingFaceFolder, open_weights, read_json
from megatron_bridge.huggingface.safetensors_file import SafetensorsFile
from megatron_bridge.registry import HfConfig, architecture, has_value_head, tied
from megatron_bridge.source import TensorInfo
from megatron_bridge.torch_dist import reader

_KINDS = {
    Kind.HUGGINGFACE: "HuggingFace folder",
    Kind.MEGATRON: "Megatron torch_dist checkpoint",
    Kind.ENGINE: "checkpoint of a training run",
    Kind.ADAPTER: "PEFT adapter",
    Kind.FILE: "weight file",
}
_OPTIMIZER = "optimizer."


@dataclass
class Inspection:
    """What was found; None and empty where a kind has no such thing.

    Attributes:
        kind: see `Kind`.
        path: what was asked for.
        architecture: of config.json.
        supported: whether the bridge converts it; ``reason`` says why not.
        parameters: numbers that the tensors hold, as stored.
        tensors, bytes: of all tensors.
        dtypes: per dtype: tensors, parameters, bytes.
        tied: the output layer is the embedding.
        quantized: method of the quantisation.
        layout: what a Megatron checkpoint was cut for.
        files: weight files with their bytes.
        details: what else the kind has.
    """

    kind: Kind
    path: str
    architecture: str | None = None
    supported: bool | None = None
    reason: str | None = None
    parameters: int = 0
    tensors: int = 0
    bytes: int = 0
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)
    tied: bool | None = None
    quantized: str | None = None
    layout: str | None = None
    files: dict[str, int] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def inspect(path: Path) -> Inspection:
    """Look at a folder or file.

    Raises:
        ValueError: when it is no checkpoint or damaged.
    """
    kind = kind_of(path)
    found = Inspection(kind, str(path))
    look = {
        Kind.HUGGINGFACE: _huggingface,
        Kind.MEGATRON: _megatron,
        Kind.ENGINE: _engine,
        Kind.ADAPTER: _adapter,
        Kind.FILE: _file,
    }
    look[kind](found, path)
    return found


def _huggingface(found: Inspection, path: Path) -> None:
    folder = HuggingFaceFolder(path)
    _count(found, folder.tensors())
    _model(found, folder.config())
    found.files = _sizes(folder.files)


def _engine(found: Inspection, path: Path) -> None:
    """Parameters as the ranks hold them: those that ranks share are counted for each file."""
    told = engine_files.description(path)
    files = [SafetensorsFile(file) for file in sorted(path.glob("*.safetensors"))]
    infos = {(str(f.path), name): info for f in files for name, info in f.infos.items()}
    own = {k: v for k, v in infos.items() if k[1].startswith(engine_files.PARAMETERS)}
    _count(found, {"/".join(key): info for key, info in own.items()})
    config = Path(str(told.get("model", ""))) / "config.json"
    if config.is_file():
        _model(found, engine_files.config_of(told, read_json(config)))
    sizes = asdict(told["layout"]).items()
    found.layout = ",".join(f"{name}={size}" for name, size in sizes if size not in (1, None))
    found.files = _sizes([file.path for file in files])
    found.details |= {
        "optimizer_steps": told.get("optimizer_steps"),
        "optimizer_bytes": sum(v.bytes for k, v in infos.items() if k not in own),
        "model": told.get("model"),
    }


def _megatron(found: Inspection, path: Path) -> None:
    folder = reader.find(path)
    assert folder is not None
    checkpoint = reader.TorchDist(folder)
    tensors = checkpoint.tensors()
    _count(found, {k: v for k, v in tensors.items() if not k.startswith(_OPTIMIZER)})
    optimizer = {k: v for k, v in tensors.items() if k.startswith(_OPTIMIZER)}
    config = folder.parent / COMPANIONS / "config.json"
    if config.is_file():
        _model(found, read_json(config))
    found.layout = _layout(checkpoint)
    found.files = _sizes(sorted(folder.glob("*.distcp")))
    found.details = {
        "checkpoint": folder.name,
        "chunks": sum(len(checkpoint.chunks(name)) for name in tensors),
        "optimizer_bytes": sum(info.bytes for info in optimizer.values()),
        "objects": len(checkpoint.objects()),
    }


def _layout(checkpoint: reader.TorchDist) -> str | None:
    """As our converter notes it. Megatron-LM's own arguments are a pickle that is not run."""
    try:
        return layout_of(checkpoint.common())
    except ValueError:
        return None


def _adapter(found: Inspection, path: Path) -> None:
    config = read_json(path / "adapter_config.json")
    weights = adapter_weights(path)
    _count(found, open_weights(weights).infos)
    found.files = _sizes([weights])
    shown = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules")
    found.details = {name: config[name] for name in shown if name in config}


def _file(found: Inspection, path: Path) -> None:
    _count(found, open_weights(path).infos)
    found.files = _sizes([path])


def _sizes(files: Any) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in files}


def _count(found: Inspection, tensors: Mapping[str, TensorInfo]) -> None:
    for info in tensors.values():
        name = str(info.dtype).removeprefix("torch.")
        entry = found.dtypes.setdefault(name, {"tensors": 0, "parameters": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["parameters"] += math.prod(info.shape)
        entry["bytes"] += info.bytes
    found.tensors = len(tensors)
    found.parameters = sum(entry["parameters"] for entry in found.dtypes.values())
    found.bytes = sum(entry["bytes"] for entry in found.dtypes.values())


def _model(found: Inspection, config: HfConfig) -> None:
    found.architecture = ", ".join(config.get("architectures") or [config.get("model_type", "?")])
    found.tied = tied(config)
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        found.quantized = str(quantization.get("quant_method"))
    try:
        table = architecture(config)
        translation.resolve({k: v for k, v in config.items() if k != "quantization_config"})
    except ValueError as error:
        found.supported, found.reason = False, str(error)
    else:
        found.supported = True
        sizes = table.sizes({**table.defaults, **config})
        found.details["layers"] = config["num_hidden_layers"]
        if not has_value_head(config):
            sizes = {name: size for name, size in sizes.items() if name != "labels"}
        found.details |= {name: size for name, size in sizes.items() if size}


def table(found: Inspection) -> str:
    """For people: two columns, then the dtypes."""
    rows = [
        ("path", found.path),
        ("kind", _KINDS[found.kind]),
        ("architecture", found.architecture),
        ("supported", _supported(found)),
        ("layout", found.layout),
        ("parameters", f"{found.parameters:,}"),
        ("tensors", f"{found.tensors:,}"),
        ("size", show_bytes(found.bytes)),
        ("tied", None if found.tied is None else "yes" if found.tied else "no"),
        ("quantised", found.quantized),
        ("files", f"{len(found.files)}, {show_bytes(sum(found.files.values()))}"),
        *((name.replace("_", " "), _value(value)) for name, value in found.details.items()),
    ]
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:{width}}{value}" for name, value in rows if value is not None]
    for name, entry in found.dtypes.items():
        counts = f"{entry['tensors']:,} tensors, {entry['parameters']:,} parameters"
        lines.append(f"{name:{width}}{counts}, {show_bytes(entry['bytes'])}")
    return "\n".join(lines)


def _supported(found: Inspection) -> str | None:
    if found.supported is None:
        return None
    return "yes" if found.supported else f"no: {found.reason}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
