"""Every fault that ``check`` finds beyond form, each on a recipe that is sound but for it."""

import json
import os
import struct
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from hybridflow import owned
from hybridflow.cli import main
from hybridflow.recipe.checks import check, check_file
from hybridflow.recipe.load import load_recipe
from megatron_bridge.mappings import huggingface_shapes
from megatron_bridge.translation import resolve

from .conftest import CONFIG

ROOT = Path(__file__).parents[2]


def faults_of(*overrides: str) -> list[str]:
    return [str(fault) for fault in check_file("recipe.yaml", overrides)[1]]


SUPERVISED = ("roles.reference=null", "roles.reward=null", "algorithm.kl={}")
"""What steps on answers have no use for."""


def test_a_sound_recipe_has_no_fault(workspace: Path):
    assert faults_of() == []
    assert check(load_recipe("recipe.yaml")) == []


SETTINGS = [
    ("roles.actor.parallel={tp: 3}", "tp=3 does not divide num_key_value_heads=2", "[1, 2]"),
    ("roles.actor.parallel={pp: 3}", "pp=3 does not divide num_hidden_layers=4", "[1, 2, 4]"),
    ("roles.reference={parallel: {pp: 3}}", "roles.reference: pp=3 does not divide", "[1, 2, 4]"),
    ("data.prompts_per_step=5", "does not divide over dp=2", "such as 4 or 6"),
    ("roles.actor.mini_batches=3", "do not divide into mini_batches=3", "multiple of 6"),
    ("data.prompts_per_step=14", "has 12 rows, but a step takes 14", "at most 12"),
    ("evaluation.prompts=4", "has 3 rows, but an evaluation takes 4", "at most 3"),
    ("roles.actor.micro_batch_tokens=11", "cannot hold the longest sample", "at least 12"),
    ("roles.reference.micro_batch_tokens=11", "cannot hold the longest sample", "at least 12"),
    ("data.max_prompt_tokens=61", "exceed the model's 64 positions", "lower"),
    ("cluster.devices_per_node=2", "need 3 devices (actor 2 + rollout 1)", "colocate"),
    ("roles.reference.parallel={dp: 4}", "colocated with 'actor' need 4", "no larger"),
    ("data.samples_per_prompt=1", "compares samples of a prompt", "2 or more"),
    (
        "warm_start={steps: 1, lr: 1e-3, prompts_per_step: 4, dataflow: grpo}",
        "in a warm start",
        "on the data's answers",
    ),
    ("algorithm.clip=[0.2, .inf]", "must be a number above 0", "`clip: [0.2, 0.28]`"),
    ("algorithm.agreement=null", "must be a mapping", "bound: null, old_bound: null}`"),
    ("dataflow={nodes: {}}", "command line: the dataflow has no nodes", "add nodes"),
    ("data.eval=null", "no data to evaluate on", "data.eval"),
    ("dataflow=mute.yaml", "checkpoint.every does nothing", "call: save"),
    ("data.train=absent.jsonl", "no data file absent.jsonl", "mend the path"),
    ("data.train=model/tokenizer.json", "none of .jsonl, .csv", "mend the file"),
    ("data.train=assets/quickstart/x.jsonl", "no data file assets", "`hybridflow make quickstart`"),
    ("model.path=assets/smollm2-135m", "no model folder assets", "run `hybridflow make smollm2`"),
    ("model.path=absent", "no model folder absent", "mend the path"),
    ("roles.rollout.engine=sglang", "no interpreter .venv-sglang/bin/python", "make sglang"),
    ("roles.rollout.parallel.tp=2", "local engine runs on one device", "engine: sglang"),
    ("roles.rollout.sync.transport=broadcast", "the local engine has none", "`direct` or `disk`"),
    ("roles.rollout.sync={transport: disk, mode: bucketed}", "has no modes", "transport: direct"),
    ("roles.rollout.sync={transport: disk, mode: standby}", "has no modes", "remove it"),
    ("roles.rollout.sync={transport: disk, bucket: 1GiB}", "has no buckets", "remove it"),
    ("roles.rollout.sync.bucket=4095B", "cut every row of the weights", "4KiB or more"),
    ("roles.rollout.sync.directory=/proc", "/proc is no folder that can be written", "choose"),
    ("roles.rollout.sync.full_every=4", "`direct` writes none", "transport: disk"),
    ("roles.rollout.sync.pause=in_place", "max_staleness 0 excludes", "use retract"),
    ("roles.rollout.sync={transport: disk, pause: in_place}", "drop that load", "use retract"),
    ("roles.rollout.parallel.ep=2", "ep=2 does not divide tp=1", "choose ep from [1]"),
    ("roles.rollout.sync.directory=absent", "absent is no folder", "choose another"),
    ("roles.reward.function=exact_mach", "unknown reward", "did you mean 'exact_match'?"),
    ("roles.reward.function=nowhere.fn", "no module 'nowhere'", "Install"),
    ("roles.reward.function=json.lods", "has no 'lods'", "did you mean 'loads'?"),
    ("roles.reward.function=absent.py:fn", "no file absent.py", "mend the path"),
    ("roles.reward.function=mine.py:scor", "mine.py has no 'scor'", "did you mean 'score'?"),
    ("roles.reward.function=broken.py:fn", "broken.py:2: not valid Python", "mend"),
    ("roles.reward.parameters={strp: true}", "no parameter 'strp'", "did you mean 'strip'?"),
    ("roles.reward.parameters={strip: 3}", "must be bool, not 3", "white space"),
    ("roles.reward={function: length}", "needs the parameter 'budget'", "budget"),
    ("roles.reward={function: mine.py:score, parameters: {scal: 2}}", "no parameter 'scal'", "no"),
    ("roles.reward={function: mine.py:needy}", "needs the parameter 'scale'", "parameters"),
    ("roles.reward={function: mine.py:few}", "few takes 2 arguments", "(prompt, response,"),
    ("roles.reward={_target_: mine.py:needy, scale: 1, scal: 2}", "no parameter 'scal'", "did"),
    ("roles.reward={_target_: exact_match, parameters: {}}", "`parameters` beside", "keep one"),
    ("roles.reward={workers: 2}", "needs either `function` or `functions`", "exact_match"),
    ("roles.reward={function: exact_match, functions: {a: {function: length}}}", "either", "write"),
    ("roles.reward={functions: {}}", "a mapping of a name to a function", "functions: {right"),
    ("roles.reward={functions: {a/b: {function: exact_match}}}", "names of letters", "rename"),
    ("roles.reward={functions: {a: {function: exact_match, wait: 1}}}", "unknown key", "'weight'"),
    ("roles.reward={functions: {a: {function: exact_mach}}}", "unknown reward", "'exact_match'?"),
    ("roles.reward={functions: {a: {_target_: length, slak: 1, budget: 2}}}", "'slak'", "'slack'?"),
    ("roles.reward={_target_: length, budget: 0}", "budget` must be 1 or more", "cost nothing"),
    (
        "roles.reward={_target_: format_regex, pattern: '('}",
        "must be a Python regular expression",
        "whole",
    ),
    ("roles.reward={_target_: number_match, tolerance: -1}", "must be 0 or more", "difference"),
    ("roles.reward.timeout_seconds=5", "a sample may take 10 s", "at least 10"),
    (
        "roles.reward={function: http, parameters: {url: 'http://judge', timeout_seconds: 10}}",
        "there is no second try",
        "retries to 0",
    ),
    ("roles.reward.on_error={value: 1.0e+39}", "must be fail, group_mean or {value", "0.0}"),
    ("roles.reward.on_error={value: .nan}", "must be fail, group_mean or {value", "0.0}"),
    ("roles.reward.max_failed_share=1.5", "max_failed_share", "1"),
    ("roles.reward={function: http}", "needs the parameter 'url'", "where samples"),
    ("roles.reward={_target_: json_schema, schema: [1]}", "must be mapping, not [1]", "schema"),
    ("roles.reward.on_error=skip", "must be fail, group_mean or {value", "on_error: {value: 0.0}"),
    ("roles.reward.on_error={value: no}", "must be fail, group_mean or {value", "{value: 0.0}"),
    ("roles.reward.level=token", "scores whole responses, not tokens", "level to sequence"),
    ("roles.reward={functions: {a: exact_match}}", "a` must be a mapping", "{function: exact_ma"),
    ("roles.reward={functions: {a: {function: math, weight: 1.0e+39}}}", "float32", "weight: 1.0"),
    ("data.train=''", "must have at least 1 character", "train.jsonl"),
    ("roles.reward={_target_: reward_model, path: model}", "ForCausalLM has no trained head", ""),
    (
        "roles.reward={_target_: json_schema, schema: {items: {$ref: 'http://a/b#c'}}}",
        "http://a/b#c cannot be followed",
        "schema",
    ),
    (
        "roles.reward={_target_: http, url: 'http://a', token_env: T, headers: {Authorization: x}}",
        "both say who asks",
        "keep one",
    ),
    ("roles.reference=null", "'reference', which the recipe lacks", "under `roles`"),
    ("dataflow=grp", "no dataflow is named 'grp'", "did you mean 'grpo'?"),
    ("dataflow=absent.yaml", "no dataflow file absent.yaml", "mend the path"),
    ("roles.actor.optimizer={lr: 0.1, schedule: linear, min_lr: 1}", "is above lr", "lower"),
    ("roles.actor.optimizer.min_lr=1e-4", "the schedule is constant", "optimizer.schedule"),
    (
        "roles.actor.optimizer={lr: 1, schedule: cosine, warmup_steps: 5}",
        "leaves nothing of the stage's 5 optimizer steps",
        "lower",
    ),
    ("warm_start={steps: 2, prompts_per_step: 3, lr: 1}", "warm_start.prompts_per_step=3", "4"),
    (
        "warm_start={steps: 2, prompts_per_step: 2, lr: 1, train: absent.csv}",
        "no data file absent.csv",
        "mend the path",
    ),
]


MINE = """
def score(prompt, response, answer, row): return 1.0
async def needy(prompt, response, answer, row, *, scale, other=1): return scale
def few(prompt, response): return 1.0
"""


@pytest.mark.parametrize(("override", "what", "fix"), SETTINGS)
def test_one_setting_one_fault(workspace: Path, override: str, what: str, fix: str):
    (workspace / "mine.py").write_text(MINE)
    (workspace / "broken.py").write_text("x = 1\ndef fn(:\n")
    grpo = (ROOT / "recipes/dataflows/grpo.yaml").read_text()
    mute = "".join(line for line in grpo.splitlines(True) if "call: save" not in line)
    (workspace / "mute.yaml").write_text(mute)
    found = faults_of(override)
    assert len(found) == 1, found
    message, _, mending = found[0].partition(" Fix: ")
    assert what in message and fix in mending, found


def test_a_process_without_a_prompt_is_a_fault(workspace: Path):
    (found,) = faults_of("roles.reward.workers=5", "evaluation.prompts=3")
    assert "share 4 prompts: some have nothing" in found and "at most 4" in found
    assert faults_of("roles.reward.workers=5") == [], "of all held-out rows there may be more"


def test_a_schema_may_point_into_itself(workspace: Path):
    for schema in (
        "{$defs: {a: {}}, $ref: '#/$defs/a'}",
        "{$id: 'http://a/b', $ref: 'http://a/b#'}",
    ):
        assert faults_of(f"roles.reward={{_target_: json_schema, schema: {schema}}}") == []


def test_sglang_needs_heads_that_divide(workspace: Path):
    overrides = ("roles.rollout.engine=sglang", f"roles.rollout.python={sys.executable}")
    assert faults_of(*overrides) == []
    found = faults_of(*overrides, "roles.rollout.parallel.tp=3", "cluster.devices_per_node=5")
    assert len(found) == 1 and "tp=3 does not divide num_key_value_heads=2" in found[0]


def test_nodes_share_no_memory(workspace: Path):
    nodes = ("cluster={nodes: 2, devices_per_node: 2}", "roles.rollout.sync.transport=disk")
    (found,) = faults_of(*nodes)
    assert "/dev/shm is the memory of one machine" in found and "all nodes share" in found
    assert faults_of(*nodes, "roles.rollout.sync.directory=.") == []
    assert faults_of(nodes[0]) == []


def test_standby_needs_room_for_two_versions_of_each_server(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
):
    """What killed runs left there is given back first."""
    left = workspace / "hybridflow-sync-left"
    left.mkdir()
    (left / owned.LOCK).write_text(f"\n{os.uname().nodename}\n1\n")
    free = os.statvfs(workspace)
    full = os.statvfs_result([*free[:3], 0, 0, *free[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    here = ("roles.rollout.sync.directory=.", "roles.rollout.parallel.dp=2")
    (found,) = faults_of(*here)
    size = sum(4 * prod(shape) for shape in huggingface_shapes(resolve(CONFIG)).values())
    assert f"({size / 1000:.2f} KB each) beside each of 2 server(s)" in found
    assert f": {4 * size / 1000:.2f} KB in ., where 0 B are free" in found and "bucketed" in found
    assert not left.exists()
    assert faults_of(*here, "roles.rollout.sync.mode=bucketed") == []
    assert faults_of(*here, "cluster={nodes: 2, devices_per_node: 12}") == []


def test_a_servers_ranks_are_on_one_node(workspace: Path):
    sglang = ("roles.rollout.engine=sglang", f"roles.rollout.python={sys.executable}")
    nodes = ("roles.rollout.parallel={tp: 2, dp: 2}", "cluster={nodes: 3, devices_per_node: 2}")
    assert faults_of(*sglang, *nodes) == []
    (found,) = faults_of(*sglang, *nodes, "cluster={nodes: 6, devices_per_node: 1}")
    message, _, fix = found.partition(" Fix: ")
    assert "2 rollout server(s) of tp=2 need 2 devices of one node each" in message
    assert "choose a tp that divides" in fix


def test_roles_that_live_apart_need_more_devices(workspace: Path):
    apart = ("roles.reference={parallel: {dp: 2}}", "cluster.devices_per_node=4")
    assert "need 5 devices (actor 2 + reference 2 + rollout 1)" in faults_of(*apart)[0]
    assert faults_of(*apart, "roles.rollout.colocate=actor") == []


def safetensors_of(header: dict) -> bytes:
    text = json.dumps(header).encode()
    end = max(entry["data_offsets"][1] for entry in header.values())
    return struct.pack("<Q", len(text)) + text + bytes(end)


def test_a_reward_model_has_a_trained_head_and_the_same_vocabulary(workspace: Path):
    grpo = (ROOT / "recipes/dataflows/grpo.yaml").read_text()
    judged = grpo.replace(
        "role: reward, call: score, in: [prompts, answers, responses]", "JUDGE", 1
    )
    judged = judged.replace("JUDGE", "role: judge, call: score, in: [prompts, responses]")
    assert judged != grpo
    (workspace / "judged.yaml").write_text(judged)
    (workspace / "judge").mkdir()
    config = CONFIG | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}

    def found(config: dict, role: str = "{head: value, model: judge, colocate: actor}"):
        (workspace / "judge" / "config.json").write_text(json.dumps(config))
        return faults_of("dataflow=judged.yaml", f"roles.judge={role}")

    assert found(config) == []
    (fault,) = found(CONFIG)
    assert "judge has no trained head, so its scores would be random" in fault
    for name in ("Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"):
        faults = found(config | {"architectures": [name], "num_labels": 2})
        assert any("judge ends in 2 scores, and a value head in one" in f for f in faults)
    (fault,) = found(config | {"architectures": ["Qwen3ForTokenClassification"]})
    assert "scores are of tokens" in fault and "`pooling: mean`" in fault
    ended = config | {"eos_token_id": [3, 2], "pad_token_id": 2}
    (fault,) = found(ended)
    assert "padding is its end token" in fault and "`pooling: before_padding`" in fault
    assert found(ended | {"pad_token_id": None}) == found(ended | {"pad_token_id": 5}) == []
    (workspace / "judged.yaml").write_text(
        judged.replace("out: [rewards]}", "out: [rewards], pooling: mean}", 1)
    )
    assert found(config | {"architectures": ["Qwen3ForTokenClassification"]}) == []
    (workspace / "judged.yaml").write_text(judged)
    head = {"v_head.summary.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}
    (workspace / "judge/model.safetensors").write_bytes(safetensors_of(head))
    assert found(CONFIG) == [], "a head of TRL's, beside the vocabulary"
    (workspace / "judge/model.safetensors").unlink()
    (fault,) = found(config | {"vocab_size": 41})
    assert "judge has 41 token ids, model.path 40" in fault
    (fault,) = found(config, "{head: value, colocate: actor}")
    assert "model has no trained head" in fault
    small = "{head: value, model: judge, colocate: actor, micro_batch_tokens: 12}"
    (fault,) = found(config, small)
    assert "cannot hold the longest sample and its end" in fault and "at least 13" in fault


def test_a_policy_does_not_end_in_scores(workspace: Path):
    config = CONFIG | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (workspace / "model" / "config.json").write_text(json.dumps(config))
    assert any("actor, reference give the probabilities of tok" in fault for fault in faults_of())


def test_a_section_that_is_a_plain_value(workspace: Path):
    assert any("sync: " in fault for fault in faults_of("roles.rollout.sync=direct"))
    (found,) = faults_of("roles.critic=3")
    assert "`roles.critic` must be a mapping" in found and "`critic: {optimizer: {lr: " in found
    (found,) = faults_of("roles.reward=exact_match")
    assert "write for instance `reward: {function: exact_match}`" in found


def test_a_target_is_the_long_form_in_short(workspace: Path):
    (workspace / "mine.py").write_text(MINE)
    short = load_recipe("recipe.yaml", ["roles.reward={_target_: mine.py:needy, scale: 2}"])
    long = "roles.reward={function: mine.py:needy, parameters: {scale: 2}}"
    assert short == load_recipe("recipe.yaml", [long])
    recipe = (workspace / "recipe.yaml").read_text()
    lines = recipe.replace("{function: exact_match}", "\n    _target_: mine.py:needy\n    scal: 2")
    (workspace / "recipe.yaml").write_text(lines)
    found = "\n".join(faults_of())
    assert "recipe.yaml:17: the reward 'mine.py:needy' has no parameter 'scal'" in found


def test_rewards_of_ones_own(workspace: Path):
    (workspace / "mine.py").write_text("def score(prompt, response, answer, row): return 1.0\n")
    assert faults_of("roles.reward.function=mine.py:score") == []
    assert faults_of("roles.reward.function=json.JSONDecoder") == []


def test_what_would_give_a_failed_sample_nothing_or_could_not_be_told(workspace: Path):
    (workspace / "mine.py").write_text("def score(p, r, a, row, limit): return 1.0\n")
    (found,) = faults_of("roles.reward={function: 'mine.py:score', parameters: {limit: .inf}}")
    assert "parameters.limit` is inf, for which JSON has no form" in found
    alone = ("data.samples_per_prompt=1", "roles.reward.on_error=group_mean")
    assert any("of a prompt's other samples, and there is one" in f for f in faults_of(*alone))
    assert any("of a prompt's other samples" in f for f in faults_of(alone[1], "dataflow=remax"))
    assert faults_of(alone[1]) == []


@pytest.mark.parametrize(("stage", "key"), [("grpo", "dataflow"), ("sft", "warm_start.dataflow")])
def test_training_that_no_server_hears_of_is_a_fault(workspace: Path, stage: str, key: str):
    text = (ROOT / f"recipes/dataflows/{stage}.yaml").read_text()
    lines = [line for line in text.splitlines(True) if "call: publish" not in line]
    Path("quiet.yaml").write_text("".join(lines).replace("after: [publish]", "after: [update]"))
    (found,) = faults_of("warm_start={steps: 2, prompts_per_step: 2, lr: 1}", f"{key}=quiet.yaml")
    assert "'update' trains the actor, but no node publishes its weights" in found
    assert "add `publish: {role: actor, call: publish, to: rollout, after: [update]}`" in found


def test_losses_need_their_inputs(workspace: Path):
    grpo = (ROOT / "recipes/dataflows/grpo.yaml").read_text()
    for lost, needed in (
        (" old_logprobs,", "lacks `old_logprobs`, which mini_batches * epochs > 1"),
        (" ref_logprobs,", "lacks `ref_logprobs`, which algorithm.kl.coef > 0"),
        (", advantages]\n    loss", "lacks `advantages`, which the loss 'ppo_clip'"),
    ):
        kept = "]\n    loss" if "loss" in lost else ""
        Path("flow.yaml").write_text(grpo.replace(lost, kept))
        found = faults_of("dataflow=flow.yaml", "roles.actor.epochs=2")
        assert len(found) == 1 and needed in found[0], found
        assert found[0].startswith("flow.yaml:9")


def test_a_field_of_a_node_that_is_off(workspace: Path):
    grpo = (ROOT / "recipes/dataflows/grpo.yaml").read_text()
    Path("flow.yaml").write_text(grpo.replace("out: [rewards]}", "out: [rewards], when: kl}"))
    assert "off (when: kl)" in faults_of("dataflow=flow.yaml", "algorithm.kl.coef=0")[0]
    Path("flow.yaml").write_text(grpo.replace("out: [rewards]}", "out: [rewards], every: 2}"))
    assert "which runs every 2 only" in faults_of("dataflow=flow.yaml")[0]


def test_evaluation_needs_its_section_and_its_nodes(workspace: Path):
    sft = (ROOT / "recipes/dataflows/sft.yaml").read_text()
    Path("flow.yaml").write_text(sft[: sft.index("  held_out")])
    (found,) = faults_of("dataflow=flow.yaml", "data.samples_per_prompt=1", *SUPERVISED)
    assert "no node of the dataflow evaluates" in found
    grpo = (ROOT / "recipes/dataflows/grpo.yaml").read_text()
    Path("flow.yaml").write_text(grpo.replace("every: evaluation", "every: 1"))
    found = faults_of("dataflow=flow.yaml", "evaluation=null")
    assert len(found) == 2 and "no evaluation section" in found[0], found
    Path("flow.yaml").write_text(
        grpo.replace("out: [responses, ", "sampling: evaluation, out: [responses, ")
    )
    assert "samples training rows as evaluation" in faults_of("dataflow=flow.yaml")[0]


def test_supervised_steps_have_one_sample(workspace: Path):
    told = ["dataflow=sft", "evaluation=null", *SUPERVISED]
    found = faults_of(*told)
    assert len(found) == 1 and "set data.samples_per_prompt to 1" in found[0]
    assert faults_of(*told, "data.samples_per_prompt=1") == []


def test_every_fault_at_once(workspace: Path):
    text = Path("recipe.yaml").read_text().replace("dataflow: grpo", "dataflow: flow.yaml")
    text = text.replace("steps: 5", "steps: 0").replace("dp: 2", "dp: 3, tp: 4")
    Path("recipe.yaml").write_text(text.replace("lr: 1e-3", "lr: 1e-3, warmup: 3"))
    grpo = (ROOT / "recipes/dataflows/grpo.yaml").read_text()
    grpo = grpo.replace("in: [rewards]", "in: [reward]").replace(
        "role: reference", "role: refrence"
    )
    Path("flow.yaml").write_text(grpo)
    Path("train.jsonl").write_text("nonsense\n")
    (workspace / "model/tokenizer.json").unlink()
    found = faults_of()
    for part in (
        "recipe.yaml:10: `steps`",
        "recipe.yaml:12: unknown key 'warmup'",
        "recipe.yaml:12: roles.actor: tp=4 does not divide num_attention_heads=6",
        "prompts_per_step=4 does not divide over dp=3",
        "recipe.yaml:3: the roles need 13 devices",
        "recipe.yaml:2: model holds no tokenizer",
        "train.jsonl:1: not JSON",
        "flow.yaml:8: node 'advantage' consumes 'reward'",
        "flow.yaml:7: node 'ref' acts on the role 'refrence'",
    ):
        assert any(part in fault for fault in found), (part, found)


def test_exit_codes_and_one_clear_line(workspace: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["check", "recipe.yaml"]) == 0
    assert capsys.readouterr().out == "recipe.yaml: ok, 5 steps of main on 3 device(s)\n"
    assert main(["check", "recipe.yaml", "steps=0", "sed=1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and errors[-1] == "recipe.yaml: 2 faults"
    assert main(["explain", "recipe.yaml", "steps=0"]) == 2
    assert "`steps` must be" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0


def test_check_and_explain_import_no_torch(workspace: Path):
    program = (
        "import sys; from hybridflow.cli import main\n"
        "codes = [main(['check', 'recipe.yaml']), main(['explain', 'recipe.yaml'])]\n"
        "heavy = {'torch', 'ray', 'transformers', 'megatron', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(max(codes))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
