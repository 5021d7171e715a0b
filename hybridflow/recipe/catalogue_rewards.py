"""The rewards that a recipe may name without a path. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridflow.recipe.registry import Registry
from hybridflow.recipe.rules import (
    COUNT,
    HEADERS,
    INDEX,
    NOT_EMPTY,
    REGEX,
    SCHEMA,
    SCORING_FOLDER,
    URL,
    VARIABLE,
    above,
    at_least,
)
from hybridflow.recipe.signature import Option


@dataclass(frozen=True)
class RewardEntry:
    """A reward known by name.

    Attributes:
        token_level: it can score single tokens.
        from_python: it was registered by a program; its signature tells its parameters, when it is
            loaded.
    """

    description: str
    parameters: Mapping[str, Option] = field(default_factory=dict)
    token_level: bool = False
    from_python: bool = False


_REWARDS: dict[str, RewardEntry] = {
    "exact_match": RewardEntry(
        "1 when the response is the answer, letter for letter",
        {"strip": Option("bool", True, description="ignore white space at both ends")},
    ),
    "format_regex": RewardEntry(
        "1 when a regular expression matches the whole response",
        {
            "pattern": Option(
                "str", required=True, description="what the whole response matches", rule=REGEX
            )
        },
    ),
    "http": RewardEntry(
        "what a service gives, asked over HTTP",
        {
            "url": Option("str", required=True, description="where samples are posted", rule=URL),
            "batch": Option("int", 32, description="most samples of one request", rule=COUNT),
            "calls_at_once": Option("int", 4, description="most requests under way", rule=COUNT),
            "headers": Option("mapping", description="sent with each request", rule=HEADERS),
            "token_env": Option(
                "str",
                description="environment variable with a token, sent as `Bearer`",
                rule=VARIABLE,
            ),
            "timeout_seconds": Option(
                "float",
                description="deadline of each try; null: a share of what is left",
                rule=above(0, 1e7),
            ),
            "retries": Option(
                "int", 2, description="tries after the first one, in time", rule=INDEX
            ),
            "send_row": Option("bool", False, description="also send the row of data"),
        },
        token_level=True,
    ),
    "json_schema": RewardEntry(
        "1 when the response is JSON that a schema allows",
        {
            "schema": Option(
                "mapping", description="the schema; null: the row's answer", rule=SCHEMA
            ),
            "tag": Option("str", description="look only within the last `<tag>`", rule=NOT_EMPTY),
        },
    ),
    "length": RewardEntry(
        "1 up to a number of characters, then falling to 0",
        {
            "budget": Option(
                "int", required=True, description="characters that cost nothing", rule=COUNT
            ),
            "slack": Option(
                "int", 0, description="characters over which the reward falls", rule=INDEX
            ),
        },
    ),
    "math": RewardEntry(
        "1 when the response's expression equals the answer's, by math-verify",
        {"tag": Option("str", description="look only within the last `<tag>`", rule=NOT_EMPTY)},
    ),
    "number_match": RewardEntry(
        "1 when the last number of the response is that of the answer",
        {
            "tolerance": Option(
                "float", 0.0, description="largest difference that is equal", rule=at_least(0)
            )
        },
    ),
    "reasoning_gym": RewardEntry(
        "the score of reasoning-gym's own scorer for the row's task",
        {
            "tag": Option(
                "str", description="score only what stands within the last `<tag>`", rule=NOT_EMPTY
            )
        },
    ),
    "reward_model": RewardEntry(
        "the logit of a transformers model of a local folder",
        {
            "path": Option(
                "str", required=True, description="the model's folder", rule=SCORING_FOLDER
            ),
            "batch": Option("int", 8, description="most samples of one forward pass", rule=COUNT),
            "label": Option("int", description="which logit, where there are several", rule=INDEX),
            "dtype": Option(
                "str", "float32", choices=("float32", "bfloat16"), description="of the weights"
            ),
            "max_tokens": Option(
                "int",
                description="most tokens of a sample; null: the model's positions",
                rule=COUNT,
            ),
            "chat_column": Option(
                "str",
                description="column for the model's own chat template; null: plain text",
                rule=NOT_EMPTY,
            ),
            "suffix": Option(
                "str",
                description="text that follows the response; null: the end token where the model "
                "was trained here and chat_column is null, else nothing",
            ),
        },
    ),
}

REWARDS = Registry(
    "reward",
    _REWARDS,
    aliases={"exact": "exact_match", "regex": "format_regex", "math_verify": "math"},
)
