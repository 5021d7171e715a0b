"""What docs/rewards.md shows runs as it says."""

import re
from pathlib import Path

import pytest

from hybridflow.rewards import REWARDS, resolve

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_every_reward_is_listed():
    table = TEXT.split("## Those that ship")[1].split("## Your own")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(REWARDS)


def test_the_examples_run(tmp_path):
    own, digits, score = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(own)
    function = resolve("my_rewards.py:ends_well", {"ending": "!"}, base=tmp_path)
    assert function.call("p", "yes!", None, {}) == 1.0
    (tmp_path / "tokens.py").write_text(digits)
    tokens = resolve("tokens.py:digits", base=tmp_path)
    assert tokens.call("p", ["a", " 7"], None, {}) == pytest.approx([0.0, 0.1])
    exec(score, {})
