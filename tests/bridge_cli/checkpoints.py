"""Checkpoints to convert, and the command that converts them in processes of its own.

Importing torch takes longer than the conversions here, so the processes are forked from one that
has imported what the command imports. What they run is the command line's own entry.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DEADLINE = 240.0
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["megatron_bridge.convert.request", "megatron_bridge.inspection", "megatron_bridge.difference"]
)


@dataclass(frozen=True)
class Done:
    """A command that ended; ``status`` is negative when a signal killed it."""

    status: int
    output: str
    error: str


class Running:
    """A command at work."""

    def __init__(
        self, arguments: tuple[Any, ...], limits: dict[int, int], ignored: int | None, folder: str
    ) -> None:
        self._folder = Path(folder)
        paths = [str(self._folder / name) for name in ("output", "error")]
        for path in paths:
            Path(path).touch()
        words = [str(argument) for argument in arguments]
        self._process = _SERVER.Process(target=_run, args=(words, limits, ignored, *paths))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def running(self) -> bool:
        """True until it ends."""
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def workers(self) -> list[int]:
        """Process ids of its workers."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def wait(self) -> Done:
        """Wait for the end."""
        self._process.join(DEADLINE)
        if self._process.exitcode is None:
            self.send(signal.SIGKILL)
            raise AssertionError(f"the command still runs after {DEADLINE} s")
        output, error = ((self._folder / name).read_text() for name in ("output", "error"))
        return Done(self._process.exitcode, output, error)


def _run(
    words: list[str], limits: dict[int, int], ignored: int | None, output: str, error: str
) -> None:
    """The child's side: the command with its own stdout and stderr."""
    for number, path in ((1, output), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
    if ignored is not None:
        signal.signal(ignored, signal.SIG_IGN)
    from megatron_bridge.cli import main

    sys.exit(main(words))


def start(
    *arguments: Any, limits: dict[int, int] | None = None, ignored: int | None = None
) -> Running:
    """Start the command.

    Args:
        arguments: of the command line.
        limits: resource limits, as `resource` names them.
        ignored: a signal that is ignored when it starts, as nohup does.
    """
    return Running(arguments, limits or {}, ignored, tempfile.mkdtemp())


def command(*arguments: Any, **options: Any) -> Done:
    """Run the command to its end."""
    return start(*arguments, **options).wait()


def succeed(*arguments: Any, **options: Any) -> str:
    """What the command prints, which must succeed."""
    done = command(*arguments, **options)
    assert done.status == 0, (done.status, done.error)
    return done.output


def fail(*arguments: Any, status: int = 2, **options: Any) -> str:
    """The message of a command that must fail: with this status and without a traceback."""
    done = command(*arguments, **options)
    assert done.status == status, done
    assert "Traceback" not in done.error, done.error
    return done.error


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def qwen3_config(**sizes: Any) -> dict[str, Any]:
    """config.json of a small Qwen3."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 1031,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **sizes,
    }


def write_qwen3(folder: Path, files: int = 3, **sizes: Any) -> Path:
    """A random Qwen3 checkpoint in several files, with what goes along; the same every time."""
    config = qwen3_config(**sizes)
    from megatron_bridge.mappings import huggingface_shapes
    from megatron_bridge.translation import resolve

    generator = torch.Generator().manual_seed(5)
    shapes = huggingface_shapes(resolve(config))
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder
