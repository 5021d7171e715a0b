"""Plans: shipped recipes, batch algebra, pools, what is on and off, the words of explain."""

from pathlib import Path

from hybridflow.recipe.activate import SHIPPED, shipped
from hybridflow.recipe.checks import check
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.explain import explain
from hybridflow.recipe.graph_load import load_graph
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.plan import Plan

ROOT = Path(__file__).parents[2]


def plan(*overrides: str) -> Plan:
    return compile_recipe(load_recipe("recipe.yaml", overrides))


def names(plan: Plan, stage: int = -1) -> list[str]:
    return list(plan.stages[stage].graph.names)


def test_the_package_ships_the_dataflows():
    assert set(shipped()) == {
        *[
            "cispo",
            "dapo",
            "distill",
            "dpo",
            "gdpo",
            "gmpo",
            "gpg",
            "grpo",
            "grpo_full_kl",
            "grpo_shuffled",
        ],
        *["gspo", "ipo", "kto", "opo", "orpo", "ppo", "prime", "reinforce_pp"],
        *[
            "reward_model",
            "reinforce_pp_baseline",
            "remax",
            "rloo",
            "safe_rlhf",
            "sapo",
            "sft",
            "simpo",
        ],
    }
    assert SHIPPED.resolve() == ROOT / "recipes" / "dataflows"
    for name in shipped():
        load_graph(SHIPPED / f"{name}.yaml")


def test_what_is_off(workspace: Path):
    assert names(plan()) == [
        *("generate", "score", "ref", "advantage", "update"),
        *("publish", "save", "eval_generate", "eval_score"),
    ]
    bare = plan("algorithm.kl.coef=0", "evaluation=null", "checkpoint.every=null")
    assert names(bare) == ["generate", "score", "advantage", "update", "publish"]
    assert bare.stages[0].off["ref"] == "when: kl"
    assert bare.stages[0].graph.inputs == ("prompts", "answers")
    assert bare.roles == ("actor", "rollout", "reward")
    update = bare.stages[0].graph.node("update")
    assert "ref_logprobs" not in update.inputs and "old_logprobs" not in update.inputs
    assert "old" in names(plan("roles.actor.epochs=2"))
    assert plan().stages[0].graph.node("save").every == 2


def test_after_reaches_through_a_node_that_is_off(workspace: Path):
    text = (SHIPPED / "grpo.yaml").read_text()
    text = text.replace("after: [publish], every: checkpoint", "after: [old, eval_score]")
    Path("flow.yaml").write_text(text)
    graph = plan("dataflow=flow.yaml", "evaluation=null").stages[0].graph
    assert set(graph.node("save").after) == {"generate", "publish"}


def test_stages(workspace: Path):
    warm = plan("warm_start={steps: 7, prompts_per_step: 8, lr: 2e-3}", "roles.actor.epochs=2")
    first, second = warm.stages
    assert (first.name, first.steps, first.samples_per_prompt) == ("warm_start", 7, 1)
    assert (first.trained["actor"].optimizer.lr, first.off_policy) == (2e-3, False)
    assert first.data == "train.jsonl"
    assert first.graph.node("publish").every == "end"
    assert (second.name, second.optimizer_steps("actor"), second.off_policy) == ("main", 10, True)


def test_optimizer_steps_count_the_updates_that_are_due(workspace: Path):
    text = (SHIPPED / "grpo.yaml").read_text()
    Path("flow.yaml").write_text(text.replace("loss: ppo_clip", "loss: ppo_clip\n    every: 2"))
    made = plan("dataflow=flow.yaml", "roles.actor.mini_batches=2")
    assert made.stages[0].optimizer_steps("actor") == 6  # steps 2, 4 and 5, the last
    late = "prompts: 1, responses: 1, rollout_logprobs: 1, token_versions: 1, advantages: 1"
    text = text.replace("old_logprobs, ref_logprobs, advantages]", "advantages]")
    text = text.replace("loss: ppo_clip", f"loss: ppo_clip\n    delay: {{{late}}}")
    Path("flow.yaml").write_text(text)
    (stage,) = plan("dataflow=flow.yaml", "algorithm.kl.coef=0").stages
    assert stage.optimizer_steps("actor") == 4  # all but the first of 5


def test_batch_algebra(workspace: Path):
    made = plan(
        *("data.prompts_per_step=24", "data.samples_per_prompt=5", "roles.actor.mini_batches=3"),
        "roles.actor.micro_batch_tokens=38",
    )
    batch = made.algebra(made.stages[0], "actor")
    assert (batch.prompts, batch.samples, batch.dp) == (24, 120, 2)
    assert (batch.prompts_per_rank, batch.samples_per_rank) == (12, 60)
    assert batch.mini_batch_samples == 20
    assert (batch.max_sample_tokens, batch.max_step_tokens) == (12, 1440)
    assert batch.max_micro_batches == 7  # 3 samples of 12 tokens fit into 38


def test_pools(workspace: Path):
    def pools(*overrides: str) -> dict[str, tuple[int, tuple[str, ...]]]:
        return {p.name: (p.devices, p.roles) for p in plan(*overrides).pools.values()}

    assert pools() == {"actor": (2, ("actor", "reference")), "rollout": (1, ("rollout",))}
    assert pools("roles.rollout.colocate=actor") == {
        "actor": (2, ("actor", "reference", "rollout"))
    }
    apart = ("roles.reference={parallel: {pp: 2, tp: 2}}", "roles.rollout.parallel={tp: 1, dp: 3}")
    assert pools(*apart) == {
        "actor": (2, ("actor",)),
        "reference": (4, ("reference",)),
        "rollout": (3, ("rollout",)),
    }
    made = plan()
    assert made.layouts["reference"] == made.layouts["actor"]
    assert made.pool_of("reward") is None


INLINE = """\
dataflow:
  inputs: [prompts, answers]
  nodes:
    sample: {role: rollout, call: generate, in: [prompts], out: [{responses: texts}]}
    right:
      {role: reward, call: score, in: [prompts, answers, {responses: texts}], out: [{rewards: a}]}
    brief:
      {role: brevity, call: score, in: [prompts, answers, {responses: texts}], out: [{rewards: b}]}
    both:
      {function: weighted_sum, in: [{first: a}, {second: b}], out: [{total: ab}], weights: [1, 0.5]}
    better: {function: group_relative, in: [{rewards: ab}], out: [{advantages: gain}]}
    learn:
      role: actor
      call: update
      in: [prompts, {responses: texts}, {advantages: gain}]
      loss: ppo_clip
    send: {role: actor, call: publish, to: rollout, after: [learn]}
algorithm: {clip: 0.2}
"""


def test_renamed_fields_and_a_second_reward(workspace: Path):
    text = Path("recipe.yaml").read_text()
    Path("recipe.yaml").write_text(text.partition("dataflow:")[0] + INLINE)
    brevity = "roles.brevity={function: length, parameters: {budget: 5}}"
    off = ["roles.reference=null", "algorithm.kl={}"]
    assert check(load_recipe("recipe.yaml", [brevity, *off])) == []
    made = plan(brevity)
    assert made.roles == ("actor", "rollout", "reward", "brevity")
    waves = [{node.name for node in wave} for wave in made.stages[0].graph.waves()]
    assert waves[1] == {"right", "brief"}
    fault = check(load_recipe("recipe.yaml", off))[0]
    assert fault.where == "recipe.yaml:22" and "'brevity', which the recipe lacks" in fault.what


def test_explain(workspace: Path):
    text = explain(plan("data.prompts_per_step=12", "algorithm.kl.coef=0"))
    for line in (
        "Devices: 3 of 12",
        "reference: not used by any node",
        "2. score",
        "ref: off (when: kl: algorithm.kl.coef > 0)",
        "prompts: 12 x 3 sample(s) = 36 samples",
        "data parallel: 2 rank(s) x 6 prompts = 18 samples each",
        "optimizer steps: 1 a step, 5 in the stage",
        "tokens: at most 12 a sample, 432 a step",
        "on-policy: one optimizer step",
    ):
        assert line in text, text
    assert "2. score, ref" in explain(plan())
    assert "off-policy: the batch feeds 2" in explain(plan("roles.actor.epochs=2"))
