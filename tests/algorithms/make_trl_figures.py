"""Writes TRL's figures: .venv-trl/bin/python tests/algorithms/make_trl_figures.py

They go to trl_figures.json beside this file, where a test compares them with the package's own.
"""

import json
from importlib.metadata import version
from pathlib import Path

from trl.rewards import get_soft_overlong_punishment

FILE = Path(__file__).parent / "trl_figures.json"
LENGTHS, LONGEST, BUFFER = [1, 15, 16, 17, 18, 19, 20, 23], 20, 4


def main() -> None:
    punish = get_soft_overlong_punishment(LONGEST, BUFFER)
    found = punish(completion_ids=[[0] * length for length in LENGTHS])
    overlong = {"lengths": LENGTHS, "longest": LONGEST, "buffer": BUFFER, "values": found}
    figures = {"trl": version("trl"), "soft_overlong": overlong}
    FILE.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
