"""Types of the fields that calls and functions of the catalogue take and give. No torch."""

from hybridflow.recipe.axes import Axis, Dtype, FieldType
from hybridflow.recipe.signature import Input


def field_type(axis: Axis, dtype: Dtype, description: str = "", quantity: str = "") -> FieldType:
    """A type with what it means; ``quantity`` tells it from others of the same axis and dtype."""
    return FieldType(axis, dtype, description, quantity)


def takes(*types: FieldType, optional: bool = False, description: str = "") -> Input:
    """A parameter of one of ``types``, described as the first of them unless told."""
    return Input(types, optional, description or types[0].description)


PROMPTS = field_type(Axis.PROMPTS, "ids", "token ids of each prompt")
ANSWERS = field_type(Axis.PROMPTS, "object", "the data's row of each prompt, with its answer")
TARGETS = field_type(
    Axis.TOKENS, "int", "token ids of each prompt's answer, end of sequence included", "token ids"
)
TARGET_MASK = field_type(
    Axis.TOKENS, "bool", "tokens of the answer to train on; of a conversation the assistant's"
)
PAIRS = field_type(
    Axis.TOKENS,
    "int",
    "token ids of two responses to each prompt: the chosen, then the rejected",
    "token ids",
)
LABELS = field_type(Axis.SAMPLES, "bool", "whether each answer is a desirable one", "labels")
MARGINS = field_type(
    Axis.PROMPTS, "float", "by how much each chosen response is the better one", "margins"
)
KL_BASELINE = field_type(Axis.RUN, "float", "KTO's estimate of the KL over the step, in nats")
RESPONSE_MASK = field_type(Axis.TOKENS, "bool", "response tokens to train on; default: all")
RESPONSES = field_type(Axis.TOKENS, "int", "token ids of each response", "token ids")
LOGPROBS = field_type(
    Axis.TOKENS, "float", "log-probability of each response token, in nats", "log-probabilities"
)
REWARD_VALUES = field_type(Axis.SAMPLES, "float", "reward of each response", "rewards")
PROMPT_VALUES = field_type(Axis.PROMPTS, "float", "one value of each prompt")
ADVANTAGES = field_type(Axis.SAMPLES, "float", "advantage of each response", "advantages")
TOKEN_ADVANTAGES = field_type(
    Axis.TOKENS, "float", "advantage of each response token", "advantages"
)
FINISHED = field_type(Axis.SAMPLES, "bool", "whether the response ended on its own", "ends")
SAMPLE_MASK = field_type(Axis.SAMPLES, "bool", "whether the response takes part")
HIDDEN = field_type(Axis.TOKENS, "vectors", "final hidden state before each response token")
VALUES = field_type(Axis.TOKENS, "float", "value of the state before each response token", "values")
RETURNS = field_type(
    Axis.TOKENS, "float", "return from each response token on: a value's target", "returns"
)
TOKEN_REWARDS = field_type(Axis.TOKENS, "float", "reward of each response token", "rewards")
TOKEN_VERSIONS = field_type(
    Axis.TOKENS, "int", "weight version that each token was sampled from", "weight versions"
)
