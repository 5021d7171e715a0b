"""The reward of benchmarks/grpo_cpu.py, the same function on both sides. Needs no package."""


def share_of_digits(prompt: str, response: str, answer: object, row: dict) -> float:
    """The part of the response's characters that are digits.

    It differs between the samples of a prompt from the first step on, so that every update has
    advantages to work with, however little the model knows.
    """
    return sum(character.isdigit() for character in response) / max(len(response), 1)
