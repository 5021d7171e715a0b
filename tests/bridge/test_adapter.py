"""LoRA adapters merged while reading: bit for bit what PEFT merges; what cannot be is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_bridge.huggingface.adapter import with_adapter
from megatron_bridge.huggingface.folder import HuggingFaceFolder
from megatron_bridge.source import TensorInfo, whole
from tests.bridge import tiny

_LINEAR = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """A base model of each kind and dtype, saved."""
    folders = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for kind in ("qwen3", "qwen2", "tied"):
            model = tiny.model("llama" if kind == "tied" else kind, tied=kind == "tied").to(dtype)
            name = f"{kind} {str(dtype).removeprefix('torch.')}"
            folders[name] = tiny.save(model, tmp_path_factory.mktemp("base"))
    sizes: dict[str, Any] = {
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 131,
        "n_positions": 32,
    }
    model = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**sizes))
    folders["gpt2 float32"] = tiny.save(model, tmp_path_factory.mktemp("gpt2"))
    return folders


def _base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def _train(model: torch.nn.Module, folder: Path, **fields: Any) -> Path:
    """An adapter whose factors, magnitudes and saved modules are all far from where they start."""
    made = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **fields}))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.add_(noise.to(parameter.dtype))
    made.save_pretrained(str(folder))
    return folder


def _merged(base: torch.nn.Module, adapter: Path) -> dict[str, torch.Tensor]:
    return peft.PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().state_dict()


_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("qwen3 float32", {"target_modules": _LINEAR}),
    "bfloat16": ("qwen3 bfloat16", {"target_modules": _LINEAR}),
    "float16": ("qwen3 float16", {"target_modules": _LINEAR}),
    "float64": ("qwen3 float64", {"target_modules": _LINEAR}),
    "every linear layer": ("qwen2 bfloat16", {"target_modules": "all-linear"}),
    "by regular expression": (
        "qwen3 bfloat16",
        {"target_modules": r".*\.[13]\.self_attn\.(q|v)_proj"},
    ),
    "some layers": ("qwen3 float32", {"target_modules": _LINEAR, "layers_to_transform": [0, 2]}),
    "rank stabilised": ("qwen3 bfloat16", {"target_modules": _LINEAR, "use_rslora": True}),
    "patterns": (
        "qwen3 float32",
        {
            "target_modules": _LINEAR,
            "use_rslora": True,
            "rank_pattern": {"up_proj": 3, r"layers\.1\.self_attn\.q_proj": 2},
            "alpha_pattern": {"down_proj": 11, r"layers.\d.self_attn.k_proj": 1.5},
        },
    ),
    "embeddings": ("qwen3 bfloat16", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied embeddings": ("tied bfloat16", {"target_modules": ["embed_tokens", "v_proj"]}),
    "head": ("qwen3 float32", {"target_modules": ["lm_head"]}),
    "modules saved whole": (
        "qwen3 bfloat16",
        {"target_modules": _LINEAR, "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    ),
    "dora": ("qwen3 float32", {"target_modules": _LINEAR, "use_dora": True}),
    "dora in bfloat16": ("qwen3 bfloat16", {"target_modules": _LINEAR, "use_dora": True}),
    "transposed layers": ("gpt2 float32", {"target_modules": ["c_attn", "c_fc", "c_proj"]}),
    "gaussian start": (
        "qwen3 bfloat16",
        {"target_modules": ["gate_proj"], "init_lora_weights": "gaussian"},
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", _CASES)
def test_equals_peft_bit_for_bit(bases, tmp_path, case):
    base, fields = _CASES[case]
    adapter = _train(_base(bases[base]), tmp_path, **fields)
    expected = _merged(_base(bases[base]), adapter)
    plain = HuggingFaceFolder(bases[base])
    source = with_adapter(plain, adapter)
    assert source.tensors() == plain.tensors()
    changed = 0
    for name, info in plain.tensors().items():
        ranges = whole(info.shape)
        ours, theirs = source.read(name, ranges), expected[name]
        assert ours.dtype == theirs.dtype == info.dtype
        assert torch.equal(ours, theirs), name
        changed += not torch.equal(ours, plain.read(name, ranges))
    assert changed


class _Two(torch.nn.Module):
    """Layers of more than one tile, with edges."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide = torch.nn.Linear(2211, 777, bias=False, dtype=dtype)
        self.words = torch.nn.Embedding(1333, 333, dtype=dtype)


@pytest.fixture(scope="module", params=["plain", "dora"])
def large(request, tmp_path_factory) -> tuple[Any, dict[str, torch.Tensor]]:
    folder, dtype = tmp_path_factory.mktemp("large"), torch.bfloat16
    dora = request.param == "dora"
    fields = {"target_modules": ["wide"] if dora else ["wide", "words"], "use_dora": dora}
    save_file(_Two(dtype).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    adapter = _train(_Two(dtype), folder / "adapter", r=24, **fields)
    source = with_adapter(HuggingFaceFolder(folder), adapter)
    return source, _merged(_Two(dtype), adapter)


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_rectangle_has_the_bits_of_the_whole(large, data):
    source, expected = large
    name = data.draw(st.sampled_from(sorted(expected)))
    ranges = []
    for size in expected[name].shape:
        first = data.draw(st.integers(0, size))
        ranges.append((first, data.draw(st.integers(first, min(size, first + 700)))))
    part = expected[name][tuple(slice(*interval) for interval in ranges)]
    assert torch.equal(source.read(name, tuple(ranges)), part)


class _Model:
    """Tensors in memory as a source."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in self._tensors.items()}

    def read(self, name: str, ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
        return self._tensors[name][tuple(slice(*interval) for interval in ranges)]


_SMALL = _Model(
    layers__0__q__weight=torch.zeros(6, 5),
    layers__1__q__weight=torch.zeros(6, 5),
    layers__1__codes__weight=torch.zeros(6, 5, dtype=torch.int8),
    lm_head__weight=torch.zeros(7, 5),
    embed_tokens__weight=torch.zeros(7, 5),
)


def _factors(module: str = "layers.0.q", rows: int = 6, columns: int = 5, rank: int = 2) -> dict:
    name = f"base_model.model.{module}.lora_"
    return {
        f"{name}A.weight": torch.ones(rank, columns),
        f"{name}B.weight": torch.ones(rows, rank),
    }


def _adapter(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> Path:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    tensors = _factors() if tensors is None else tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _error(folder: Path, model: _Model = _SMALL) -> str:
    with pytest.raises(ValueError) as error:
        with_adapter(model, folder)
    return str(error.value)


def test_a_small_merge_by_hand(tmp_path):
    source = with_adapter(_SMALL, _adapter(tmp_path))
    part = source.read("layers.0.q.weight", ((1, 3), (0, 2)))
    assert torch.equal(part, torch.full((2, 2), 4.0))  # 4 / 2 * (1 + 1)
    assert not source.read("layers.1.q.weight", whole((6, 5))).any()
    source.check_unchanged()
    _adapter(tmp_path, lora_alpha=12)
    with pytest.raises(ValueError, match=r"changed while being read: \S+adapter_config.json"):
        source.check_unchanged()


def test_a_pickled_adapter_is_read_without_code(tmp_path):
    _adapter(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    torch.save(tensors, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    source = with_adapter(_SMALL, tmp_path)
    assert source.read("layers.0.q.weight", whole((6, 5))).eq(4).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' cannot be merged; the bridge merges LORA"),
        ({"peft_type": None}, "peft_type None"),
        ({"init_lora_weights": "pissa_niter_16"}, "'pissa_niter_16' changed the base weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora'"),
        ({"bias": "all"}, "bias 'all': trained biases are not merged"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"target_parameters": ["experts"]}, "target_parameters ['experts'] is not supported"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices [3] is not supported"),
        ({"layer_replication": [[0, 4]]}, "layer_replication [[0, 4]] is not supported"),
        ({"use_something_new": 1}, "use_something_new 1 is not supported"),
        ({"r": 0}, "r or rank_pattern has a value of the wrong kind"),
        ({"r": True}, "r or rank_pattern has"),
        ({"rank_pattern": [3]}, "r or rank_pattern has"),
        ({"lora_alpha": "8"}, "lora_alpha or alpha_pattern has"),
        ({"lora_alpha": float("nan")}, "lora_alpha or alpha_pattern has"),
        ({"alpha_pattern": {"(": 3}}, "rank_pattern, alpha_pattern or target_modules has"),
        ({"target_modules": "("}, "rank_pattern, alpha_pattern or target_modules has"),
        ({"target_modules": [3]}, "target_modules has a value"),
        ({"modules_to_save": "lm_head"}, "modules_to_save has a value"),
        ({"use_dora": "yes"}, "use_rslora, use_dora or fan_in_fan_out has"),
        ({"use_dora": True}, "'layers.0.q' lacks or must not have: lora_magnitude_vector"),
        ({"target_modules": ["k"]}, "'layers.0.q' is not among target_modules"),
        ({"r": 3}, "'layers.0.q' has factors (2, 5) and (6, 2); the config says rank 3"),
        ({"rank_pattern": {"q": 4}}, "the config says rank 4"),
        ({"fan_in_fan_out": True}, "'layers.0.q' makes (5, 6), but 'layers.0.q.weight' has"),
    ],
)
def test_a_config_that_no_merge_can_follow_is_refused(tmp_path, fields, message):
    assert message in _error(_adapter(tmp_path, **fields))


def test_all_faulty_fields_are_told_at_once(tmp_path):
    text = _error(_adapter(tmp_path, bias="all", r=-1, use_qalora=True))
    assert "bias 'all'" in text and "r or rank_pattern" in text and "use_qalora True" in text


def test_all_tensors_that_do_not_fit_are_told_at_once(tmp_path):
    prefix = "base_model.model."
    tensors = {
        **_factors("layers.0.qq"),
        **_factors("layers.1.q", rows=4),
        **_factors("layers.1.codes"),
        f"{prefix}embed_tokens.weight": torch.ones(7, 5),
        "lm_head.weight": torch.ones(7, 5),
    }
    text = _error(_adapter(tmp_path, tensors, target_modules=["q", "qq", "codes"]))
    assert "'layers.0.qq' is of no tensor of the model; did you mean 'layers.0.q.weight'?" in text
    assert "'layers.1.q' makes (4, 5), but 'layers.1.q.weight' has shape (6, 5)" in text
    assert "'layers.1.codes.weight' is torch.int8, into which nothing can be merged" in text
    assert "'base_model.model.embed_tokens.weight' is neither LoRA nor named in modu" in text
    assert "'lm_head.weight' does not start with 'base_model.model.'" in text


def test_half_a_pair_and_dora_of_an_embedding_are_refused(tmp_path):
    half = dict(list(_factors().items())[:1])
    assert "'layers.0.q' lacks or must not have: lora_B.weight" in _error(_adapter(tmp_path, half))
    name = "base_model.model.embed_tokens.lora_"
    words = {
        f"{name}embedding_A": torch.ones(2, 7),
        f"{name}embedding_B": torch.ones(5, 2),
        f"{name}magnitude_vector": torch.ones(5),
    }
    folder = _adapter(tmp_path, words, target_modules=["embed_tokens"], use_dora=True)
    assert "DoRA of an embedding is not merged" in _error(folder)


def test_new_embeddings_for_a_shared_head_are_refused(tmp_path):
    tensors = {"base_model.model.embed_tokens.weight": torch.ones(7, 5)}
    folder = _adapter(tmp_path, tensors, modules_to_save=["embed_tokens"])
    source = with_adapter(_SMALL, folder)
    assert source.read("embed_tokens.weight", ((0, 2), (0, 5))).all()
    assert "shares with its head" in _error(folder, _Model(embed_tokens__weight=torch.ones(7, 5)))


def test_a_damaged_adapter_is_refused(tmp_path):
    assert "adapter_config.json cannot be read" in _error(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "has no adapter_model.safetensors or adapter_model.bin" in _error(tmp_path)
    assert "it holds no tensors" in _error(_adapter(tmp_path, {}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12345678901")
    assert "is truncated" in _error(tmp_path)
