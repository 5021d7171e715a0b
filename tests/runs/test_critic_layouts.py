"""PPO on Ray with the critic cut as the actor is, and cut its own way on devices of its own."""

from pathlib import Path

import pytest

from hybridflow.assets import make_quickstart
from hybridflow.monitor import read_metrics
from tests.dataflow.commands import TrainCommand

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart_ppo.yaml"
LAYOUTS = {
    "as the actor": [],
    "its own": ["roles.critic.parallel={tp: 2}", "roles.critic.colocate=null"],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_critics_layout_changes_nothing(tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    make_quickstart(assets)
    scorer = tmp_path / "varied.py"
    scorer.write_text(
        "def varied(prompt, response, answer, row):\n    return sum(map(ord, response)) % 7 / 7\n"
    )
    small = [
        # A large eps: Adam would else blow the rounding of vanishing gradients up to whole steps.
        *("roles.critic.optimizer={lr: 1e-3, eps: 1e-4}", "roles.critic.mini_batches=1"),
        f"roles.reward.function={scorer}:varied",
        *(f"model.path={assets}", f"data.train={assets}/train.jsonl", "evaluation=null"),
        *(f"data.eval={assets}/eval.jsonl", "data.prompts_per_step=8", "steps=2"),
        *("warm_start.steps=2", "algorithm.critic_warmup_steps=2", "cluster.devices_per_node=5"),
        "export=false",
    ]
    found = {}
    for name, told in LAYOUTS.items():
        folder = tmp_path / name.replace(" ", "_")
        run = TrainCommand(RECIPE, *small, *told, f"output={folder}", deadline=400)
        assert run.wait() == 0, run.output
        assert not run.left_over()
        found[name] = [row for row in read_metrics(folder) if row["stage"] != "warm_start"]
    assert [row["stage"] for row in found["its own"]] == ["critic_warmup"] * 2 + ["main"] * 2
    for one, other in zip(*found.values(), strict=True):
        for metric in ("critic/loss", "critic/grad_norm", "critic/value_mean"):
            wanted = pytest.approx(one["metrics"][metric], rel=1e-4, abs=1e-7)
            assert other["metrics"][metric] == wanted, metric
