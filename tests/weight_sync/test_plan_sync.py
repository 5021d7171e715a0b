"""`hybridflow plan-sync`: a recipe's traffic from config files alone."""

import json
from pathlib import Path

import pytest

from hybridflow.cli import main
from tests.bridge.published_moe import PUBLISHED

RECIPE = """\
name: plan
model: {{path: model, dtype: bfloat16}}
cluster: {{nodes: {nodes}, devices_per_node: 8}}
data: {{train: train.jsonl, prompts_per_step: 64, samples_per_prompt: 8}}
steps: 10
roles:
  actor: {{parallel: {actor}, optimizer: {{lr: 1e-6}}}}
  rollout: {{engine: sglang, parallel: {rollout}, sampling: {{max_tokens: 64}}{more}}}
  reward: {{function: exact_match}}
dataflow: grpo
"""
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def write(folder: Path, config: dict, actor: str, rollout: str, nodes: int, more: str = "") -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    text = RECIPE.format(nodes=nodes, actor=actor, rollout=rollout, more=more)
    (folder / "recipe.yaml").write_text(text)


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    assert main(["plan-sync", "recipe.yaml", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_colocated_engine_takes_only_what_its_device_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of tp=8 shards a tp=8 engine needs nothing more but heads' norms are everywhere anyway."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, QWEN3_8B, "{tp: 8}", "{tp: 8}", 1, ", colocate: actor")
    found = planned(capsys)["bytes"]
    assert found["moved"] == found["lower_bound"] == 0
    assert found["device"] == found["needed"] > found["model"]  # norms are on every rank
    apart = planned(capsys, "cluster.nodes=2", "roles.rollout.colocate=null")["bytes"]
    assert apart["network"] == apart["lower_bound"] == apart["needed"]
    assert apart["gathered"] > 8 * apart["model"]


@pytest.mark.parametrize(("actor", "tp", "dp"), [("tp: 8", 4, 2), ("tp: 4, pp: 2", 2, 4)])
def test_a_colocated_run_moves_the_papers_volume(
    actor: str,
    tp: int,
    dp: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each device keeps its training shard and takes (t p - t_g) / (t_g t p) of the model."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, QWEN3_8B, f"{{{actor}}}", f"{{tp: {tp}, dp: {dp}}}", 1, ", colocate: actor")
    found = planned(capsys)
    moved, model = found["bytes"]["moved"], found["bytes"]["model"]
    assert moved == found["bytes"]["lower_bound"] == found["bytes"]["host"]
    paper = 8 * model * (8 - tp) / (8 * tp)
    assert moved == pytest.approx(paper, rel=1e-4)  # norms are not cut


def test_a_server_larger_than_a_host_is_planned_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, QWEN3_8B, "{tp: 8}", "{tp: 8}", 4)
    found = planned(capsys, "cluster.devices_per_node=4")
    assert len(found["received"][0]) == 8
    assert found["bytes"]["network"] == found["bytes"]["moved"]


def test_the_table_names_every_link_and_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, QWEN3_8B, "{tp: 2, pp: 2, dp: 4}", "{tp: 4, dp: 2}", 3)
    assert main(["plan-sync", "recipe.yaml", "--ranks"]) == 0
    out = capsys.readouterr().out
    assert "16 trainer ranks (tp=2,pp=2,dp=4) -> 2 engine(s) of tp 4 (cuda), on 3 host(s)" in out
    assert "lower bound" in out and "gathering would move" in out
    assert "host 2" in out


def test_deepseek_v3_on_1024_ranks_to_512(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    actor = "{tp: 8, pp: 16, dp: 8, ep: 64, etp: 1, first_stage_layers: 3, last_stage_layers: 2}"
    config = PUBLISHED["deepseek-ai/DeepSeek-V3"]
    write(tmp_path, config, actor, "{tp: 32, dp: 16, ep: 32}", 192)
    found = planned(capsys)
    assert len(found["sent"]) == 1024
    assert sum(len(engine) for engine in found["received"]) == 512
    total = found["bytes"]
    assert 671e9 < total["model"] / 2 < 672e9
    assert total["moved"] == total["lower_bound"] == total["needed"]
    assert sum(sent["network"] for sent in found["sent"]) == total["network"] == total["moved"]
    assert total["moved"] < total["gathered"] / 30


def test_a_transport_of_whole_tensors_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, QWEN3_8B, "{tp: 2}", "{tp: 2, dp: 2}", 1)
    direct = planned(capsys)["bytes"]
    over = planned(capsys, "roles.rollout.sync.transport=broadcast")
    model = over["bytes"]["model"]
    assert over["transport"] == "broadcast" and "mode" not in over and "sent" not in over
    assert over["bytes"]["to server ranks"] == 4 * model
    assert over["bytes"]["direct"] == direct["moved"]
    disk = "roles.rollout.sync={transport: disk, directory: ., full_every: 5}"
    assert planned(capsys, disk)["bytes"]["written"] == model
    assert main(["plan-sync", "recipe.yaml", disk]) == 0
    out = capsys.readouterr().out
    assert "4 of 5 versions are what changed alone" in out and "transport: disk moves whole" in out
    assert "engine rank" not in out


def test_modes_differ_in_the_memory_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, QWEN3_8B, "{tp: 2}", "{tp: 2}", 1)
    standby = planned(capsys)
    assert standby["mode"] == "standby" and standby["memory"] >= standby["bytes"]["needed"]
    bucketed = "roles.rollout.sync={mode: bucketed, bucket: 64MiB}"
    assert planned(capsys, bucketed)["memory"] == 128 << 20
    assert main(["plan-sync", "recipe.yaml", bucketed]) == 0
    assert "mode bucketed: at most 134.22 MB" in capsys.readouterr().out


def test_the_local_engine_is_on_the_cpu_and_a_missing_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, QWEN3_8B, "{tp: 2}", "{dp: 2}", 1)
    assert planned(capsys, "roles.rollout.engine=local")["device"] == "cpu"
    assert planned(capsys)["device"] == "cuda"
    command = ["plan-sync", "recipe.yaml", "roles.rollout.engine=local"]
    assert main([*command, "--device", "cuda"]) == 2
    assert "the local engine runs on the CPU" in capsys.readouterr().err
    assert main([*command, "model.path=absent"]) == 2
    assert "there is no absent/config.json" in capsys.readouterr().err


def test_a_run_without_rollout_has_nothing_to_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, QWEN3_8B, "{tp: 2}", "{tp: 2}", 1)
    graph = "{inputs: [prompts, targets], nodes: {update: {role: actor, call: update, "
    graph += "in: [prompts, {responses: targets}], loss: cross_entropy}}}"
    assert main(["plan-sync", "recipe.yaml", f"dataflow={graph}"]) == 2
    assert "publishes nothing" in capsys.readouterr().err


def test_a_layout_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, QWEN3_8B, "{pp: 5}", "{tp: 2}", 1)
    assert main(["plan-sync", "recipe.yaml"]) == 2
    assert "pp=5 does not divide num_hidden_layers=36" in capsys.readouterr().err
