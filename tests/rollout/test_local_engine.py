"""What the local engine alone promises: its forward pass, seeds, batching and clean refusals."""

import json
import shutil
from pathlib import Path

import pytest
import requests
import torch

from hybridflow.rollout import Sampling
from hybridflow.rollout.local.model import Decoder
from hybridflow.rollout.local.requests import read_generate
from hybridflow.rollout.local.scheduler import Scheduler
from tests.servers import TOKEN, Rollout
from tests.tiny_models import VOCAB, make_model, reference

ALLOWED = {"Authorization": f"Bearer {TOKEN}"}

CASES = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}),
    (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            }
        },
    ),
    ("qwen2", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 4}),
    ("mistral", {}),
    ("mixtral", {}),
    ("qwen2_moe", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 6}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_equal_transformers(tmp_path: Path, family: str, changes: dict):
    folder = make_model(tmp_path / "m", family, **changes)
    model, expected = Decoder(folder, torch.float32), reference(folder)
    ids = torch.randint(0, VOCAB, (3, 19), generator=torch.Generator().manual_seed(1))
    rows, lengths = torch.arange(3), torch.tensor([15, 9, 4])
    with torch.inference_mode():
        want = expected(ids).logits
        logits, keys, values = model.prefill(ids[:, :15], lengths)
        torch.testing.assert_close(logits, want[rows, lengths - 1], atol=1e-4, rtol=1e-4)
        cache = model.new_cache()
        cache.reserve(3, 15, 0)
        cache.fill(rows, keys, values)
        cache.reserve(5, 300, 3)
        position = lengths.clone()
        for _ in range(4):
            token = ids[rows, position]
            logits = model.decode(token, position, int(position.max()) + 1, cache)
            torch.testing.assert_close(logits, want[rows, position], atol=1e-4, rtol=1e-4)
            position += 1


def test_bfloat16_is_near_transformers(tmp_path: Path):
    folder = make_model(tmp_path / "m")
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    logits, *_ = Decoder(folder, torch.bfloat16).prefill(ids, torch.tensor([9, 9]))
    with torch.inference_mode():
        want = reference(folder)(ids).logits[:, -1]
    assert logits.dtype == torch.float32
    assert (logits - want).abs().max() < 0.05 * want.abs().max()


def test_a_refused_update_changes_nothing(tmp_path: Path):
    folder = make_model(tmp_path / "m")
    model = Decoder(folder, torch.float32)
    before = {name: tensor.clone() for name, tensor in model.parameters.items()}
    other = make_model(tmp_path / "wide", seed=3, intermediate_size=96)
    with pytest.raises(ValueError, match="mlp.gate_proj.weight has shape"):
        model.update(other)
    truncated = make_model(tmp_path / "cut", seed=4) / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        model.update(truncated.parent)
    for name, tensor in model.parameters.items():
        assert torch.equal(tensor, before[name])


def test_other_formats_and_outside_files_are_not_read(tmp_path: Path):
    folder = make_model(tmp_path / "m")
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no safetensors"):
        Decoder(pickled, torch.float32)
    index = {"weight_map": {"model.norm.weight": "../m/model.safetensors"}}
    (pickled / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside its folder"):
        Decoder(pickled, torch.float32)


def test_models_that_it_cannot_run_are_named(tmp_path: Path):
    folder = make_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(ValueError, match="hidden_act='gelu'"):
        Decoder(folder, torch.float32)
    mistral = make_model(tmp_path / "window", "mistral", sliding_window=64)
    with pytest.raises(ValueError, match="sliding_window 64"):
        Decoder(mistral, torch.float32)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Next"]}))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        Decoder(folder, torch.float32)


class _CountingDecoder(Decoder):
    """Records how many rows each pass computed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, torch.float32)
        self.prefilled: list[int] = []
        self.decoded: list[int] = []

    def prefill(self, ids_BT, lengths_B):
        self.prefilled.append(len(ids_BT))
        return super().prefill(ids_BT, lengths_B)

    def decode(self, token_B, position_B, length, cache):
        self.decoded.append(len(token_B))
        return super().decode(token_B, position_B, length, cache)


def _finish(scheduler: Scheduler, *bodies: dict):
    """Run the decode loop in this thread until every request has its answer."""
    requests_ = [read_generate(body, scheduler.model) for body in bodies]
    futures = [scheduler.submit(request) for request in requests_]
    scheduler.run(until=lambda: all(future.done() for future in futures))
    return [future.result() for future in futures]


def test_samples_share_a_prefill_and_finished_rows_leave(tiny_model: Path):
    model = _CountingDecoder(tiny_model)
    scheduler = Scheduler(model, 64, "0")
    limits = [1, 2, 2, 5]
    body = {
        "input_ids": [[7, 8, 9]] * 4 + [[3, 4]] * 4,
        "sampling_params": [{"max_new_tokens": n, "sampling_seed": n} for n in limits * 2],
    }
    stops = model.eos_ids
    [done] = _finish(scheduler, body)
    assert model.prefilled == [2]
    assert model.decoded == sorted(model.decoded, reverse=True) and model.decoded[0] <= 6
    for row, limit in zip(done.rows, limits * 2, strict=True):
        assert len(row.tokens) == limit or row.tokens[-1] in stops


def test_requests_that_arrive_together_are_batched(tiny_model: Path):
    model = _CountingDecoder(tiny_model)
    scheduler = Scheduler(model, 64, "0")
    body = {"input_ids": [[7, 8, 9]], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    other = {**body, "input_ids": [[5, 6], [2, 3, 4]]}
    first, second = _finish(scheduler, body, other)
    assert model.prefilled == [3] and max(model.decoded) == 3
    assert len(first.rows) == 1 and len(second.rows) == 2


def test_rows_beyond_the_limit_wait(tiny_model: Path):
    model = _CountingDecoder(tiny_model)
    parameters = {"max_new_tokens": 6, "temperature": 0}
    body = {"input_ids": [[7, 8, 9]] * 5 + [[4, 5]], "sampling_params": parameters}
    [narrow] = _finish(Scheduler(model, 2, "0"), body)
    assert max(model.decoded) == 2
    [wide] = _finish(Scheduler(model, 64, "0"), body)
    assert [row.tokens for row in narrow.rows] == [row.tokens for row in wide.rows]


def test_a_seed_repeats_bit_for_bit(local_server: Rollout):
    client = local_server.client
    prompts = [[5, 6, 7], [9, 10]]
    first = client.generate(prompts, 6, Sampling(20, seed=11))
    assert first == client.generate(prompts, 6, Sampling(20, seed=11))
    other = client.generate(prompts, 6, Sampling(20, seed=12))
    unseeded = client.generate(prompts, 6, Sampling(20))
    assert first != other and unseeded != client.generate(prompts, 6, Sampling(20))
    assert len({tuple(sample.tokens) for group in first for sample in group}) == 12


BAD = [
    ({"input_ids": []}, "input_ids must be"),
    ({"input_ids": [[]]}, "prompt 0 is empty"),
    ({"input_ids": [[1, 2], [5, VOCAB]]}, "prompt 1 holds an id outside"),
    ({"input_ids": [[1, -1]]}, "prompt 0 holds an id outside"),
    ({"input_ids": [[1, "2"]]}, "prompt 0 holds an id outside"),
    ({"input_ids": [[1]], "sampling_params": {"max_new_tokens": 5000}}, "over the model's 4096"),
    ({"input_ids": [[1]], "sampling_params": {"max_new_tokens": 0}}, "at least 1"),
    ({"input_ids": [[1]], "sampling_params": {"temperature": -1}}, "greedy"),
    ({"input_ids": [[1]], "sampling_params": {"temperature": "hot"}}, "not a number"),
    ({"input_ids": [[1]], "sampling_params": {"top_q": 0.5}}, "did you mean 'top_p'"),
    ({"input_ids": [[1]], "sampling_params": [{}, {}]}, "one per prompt"),
    ({"input_ids": [[1]], "sampling_parms": {}}, "did you mean 'sampling_params'"),
]


@pytest.mark.parametrize(("body", "text"), BAD)
def test_bad_requests_are_clean_400s(local_server: Rollout, body: dict, text: str):
    answer = requests.post(
        local_server.server.url + "/generate", json=body, headers=ALLOWED, timeout=60
    )
    assert (answer.status_code, text in answer.json()["message"]) == (400, True), answer.text
    assert local_server.client.health()


def test_other_bad_calls(local_server: Rollout):
    url = local_server.server.url
    for path, body, status in (
        ("/generat", {}, 404),
        ("/pause_generation", {"mode": "nap"}, 400),
        ("/abort_request", {}, 400),
        ("/weights_checker", {"action": "snapshot"}, 400),
        ("/update_weight_version", {}, 400),
    ):
        assert (
            requests.post(url + path, json=body, headers=ALLOWED, timeout=60).status_code == status
        )
    raw = requests.post(url + "/generate", data=b"{not json", headers=ALLOWED, timeout=60)
    assert raw.status_code == 400
    assert local_server.client.health()
