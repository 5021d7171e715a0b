"""Reward 1 when the response is the answer, letter for letter."""


def exact_match(
    prompt: str, response: str, answer: object, row: dict, *, strip: bool = True
) -> float:
    """1.0 when ``response`` equals ``answer`` as text, else 0.0.

    Args:
        strip: compare without leading and trailing white space.
    """
    expected = str(answer)
    if strip:
        response, expected = response.strip(), expected.strip()
    return 1.0 if response == expected else 0.0
