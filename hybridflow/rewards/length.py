"""Reward for staying within a length budget."""


def length(
    prompt: str, response: str, answer: object, row: dict, *, budget: int, slack: int = 0
) -> float:
    """1.0 up to ``budget`` characters, then falling in a line to 0.0 at ``budget + slack``.

    With a budget of 100 and a slack of 50, 125 characters earn 0.5.

    Args:
        budget: characters that cost nothing; more than 0.
        slack: characters over the budget after which nothing is left; 0 makes it a step.

    Raises:
        ValueError: the budget is not positive or the slack is negative.
    """
    if budget <= 0 or slack < 0:
        raise ValueError(
            f"length needs budget > 0 and slack >= 0, not budget={budget}, slack={slack}"
        )
    excess = len(response) - budget
    if excess <= 0:
        return 1.0
    return max(0.0, 1.0 - excess / slack) if slack else 0.0
