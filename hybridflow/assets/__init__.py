"""Models and prompt files that a command of ours makes, so that every recipe has its input."""

from hybridflow.assets.quickstart import make_quickstart
from hybridflow.assets.reasoning_gym import make_reasoning_gym
from hybridflow.assets.smollm2 import make_smollm2

__all__ = ["make_quickstart", "make_reasoning_gym", "make_smollm2"]
