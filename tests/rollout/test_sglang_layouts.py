"""The real SGLang in the layouts that the session's server does not have."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.rollout import Sampling, ServerConfig, start_server
from hybridflow.weight_sync import ServerDigest, server_checksum, write_version
from tests.servers import load_and_prove
from tests.tiny_models import greedy, logprobs, make_model, reference

PROMPTS = [[5, 17, 33], [40, 8, 9, 10, 11, 12, 13]]


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "tp", "dtype", "changes"),
    [
        ("qwen3", 2, torch.float32, {}),
        ("qwen2", 1, torch.bfloat16, {}),
        ("llama", 2, torch.float32, {"tie_word_embeddings": True}),
    ],
)
def test_published_weights_are_proven(tmp_path: Path, family, tp, dtype, changes):
    folder = make_model(tmp_path / "model", family, **changes)
    other = make_model(tmp_path / "other", family, seed=5, **changes)
    config = json.loads((folder / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    server = start_server(
        ServerConfig("sglang", folder, dtype=name, tp=tp, token="s3cret", start_timeout=400)
    )
    try:
        client = server.client(timeout=120)
        first = {
            key: value.to(dtype) for key, value in load_file(folder / "model.safetensors").items()
        }
        assert client.checksum() == server_checksum(first, config, tp)
        weights = {
            key: value.to(dtype) for key, value in load_file(other / "model.safetensors").items()
        }
        digest = ServerDigest(config, tp)
        written = write_version(tmp_path / "out", digest.watch(weights.items()), folder, 1)
        load_and_prove(client, written, 1, digest.result())
        groups = client.generate(PROMPTS, 2, Sampling(12, temperature=0.0))
        model = reference(written)
        tolerance = 1e-4 if dtype == torch.float32 else 0.2
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for sample in group:
                assert sample.weight_version == "1"
                expected = logprobs(model, prompt, sample.tokens)
                assert sample.logprobs == pytest.approx(expected, abs=tolerance)
                if dtype == torch.float32:
                    assert sample.tokens == greedy(model, prompt, 12)
    finally:
        server.stop()
