"""The recipe's reward roles: what scores responses, and what becomes of samples without a score."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from hybridflow.recipe.ranges import Count, FunctionPath, Seconds, Wrong
from hybridflow.recipe.section import Section

LARGEST_REWARD = 3.4028234663852886e38
"""Of float32, which rewards become."""

_POLICIES = ("fail", "group_mean")


def is_reward(number: float) -> bool:
    """Whether float32 holds it as a finite number."""
    return abs(number) <= LARGEST_REWARD


def _on_error(value: Any) -> Any:
    if value in _POLICIES:
        return value
    number = value.get("value") if isinstance(value, dict) and [*value] == ["value"] else None
    if isinstance(number, bool) or not isinstance(number, int | float) or not is_reward(number):
        what = f"must be fail, group_mean or {{value: NUMBER}}, not {value!r}"
        raise Wrong(what, "write `on_error: {value: 0.0}`")
    return {"value": float(number)}


OnError = Annotated[Literal["fail", "group_mean"] | dict[str, float], BeforeValidator(_on_error)]


def _weight(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_reward(value):
        raise Wrong(f"must be a number that float32 holds, not {value!r}", "write `weight: 1.0`")
    return float(value)


def _functions(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        what = f"must be a mapping of a name to a function, not {value!r}"
        raise Wrong(what, "write `functions: {right: {function: exact_match, weight: 1.0}}`")
    for name in value:
        if not isinstance(name, str) or not name.replace("_", "").isalnum():
            what = f"must have names of letters, digits and '_', not {name!r}"
            raise Wrong(what, "rename it")
    return value


class FunctionSection(Section):
    """One of several functions whose weighted sum is the role's reward."""

    function: FunctionPath = Field(
        examples=["exact_match"], description="a reward's name, `pkg.mod.fn` or `file.py:fn`"
    )
    parameters: dict[str, Any] = Field(default={}, description="keyword arguments of the function")
    weight: Annotated[float, BeforeValidator(_weight)] = Field(
        default=1.0, description="its weight in the sum"
    )
    on_error: OnError | None = Field(default=None, description="null: as the role's")


class RewardSection(Section):
    """Scores responses; any role with `function`, `functions` or `_target_` does."""

    function: FunctionPath | None = Field(
        default=None,
        examples=["exact_match"],
        description="a reward's name, `pkg.mod.fn` or `file.py:fn`",
    )
    parameters: dict[str, Any] = Field(default={}, description="keyword arguments of the function")
    functions: Annotated[dict[str, FunctionSection], BeforeValidator(_functions)] | None = Field(
        default=None,
        description="instead of `function`: several by name, each with `function`, `parameters`, "
        "`weight` (1.0) and `on_error` (the role's)",
    )
    level: Literal["sequence", "token"] = Field(
        default="sequence",
        description="one value for each response, or one for each of its tokens (`token_rewards`)",
    )
    on_error: OnError = Field(
        default="fail",
        description="of a sample whose call fails or is late: end the run, give it the mean of its "
        "prompt's other samples, or `{value: NUMBER}`",
    )
    max_failed_share: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.5,
        description="of one scoring's samples: when more got what `on_error` says, the run ends; 1 "
        "allows all",
    )
    workers: Count = Field(default=1, description="processes that score, for each function")
    sample_timeout_seconds: Seconds = Field(
        default=10.0,
        description="deadline of each sample, or of each batch of a reward that takes batches",
    )
    timeout_seconds: Seconds = Field(
        default=60.0, description="deadline of one step's scoring; samples that are left are late"
    )
    start_timeout_seconds: Seconds = Field(
        default=120.0, description="deadline of loading a function"
    )
    memory_gib: Annotated[float, Field(gt=0, le=1e6)] = Field(
        default=32.0,
        description="most memory of a function's process and what it starts, in GiB; the samples "
        "that take more fail",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.function is None) == (self.functions is None):
            raise Wrong("needs either `function` or `functions`", "write `function: exact_match`")
        if self.functions is not None and self.parameters:
            raise Wrong("has `parameters` beside `functions`", "give them to one of the functions")
        return self

    def parts(self, role: str) -> dict[str, tuple[str, FunctionSection]]:
        """Every function by its name, with its key below the role: the sole one has the role's
        name and keys."""
        if self.functions is not None:
            return {name: (f".functions.{name}", part) for name, part in self.functions.items()}
        assert self.function is not None, "one of the two is given"
        return {role: ("", FunctionSection(function=self.function, parameters=self.parameters))}

    def policy(self, part: FunctionSection) -> Literal["fail", "group_mean"] | float:
        """What a sample without a score gets: a policy's name, or the value itself."""
        told = self.on_error if part.on_error is None else part.on_error
        return told["value"] if isinstance(told, dict) else told
