"""The functions that a graph may name. No torch."""

from hybridflow.recipe.axes import Axis
from hybridflow.recipe.catalogue_fields import (
    ADVANTAGES,
    FINISHED,
    KL_BASELINE,
    LABELS,
    LOGPROBS,
    PROMPT_VALUES,
    PROMPTS,
    RESPONSE_MASK,
    RESPONSES,
    RETURNS,
    REWARD_VALUES,
    TOKEN_ADVANTAGES,
    TOKEN_REWARDS,
    TOKEN_VERSIONS,
    VALUES,
    field_type,
    takes,
)
from hybridflow.recipe.registry import Registry
from hybridflow.recipe.rules import COUNT, DISCOUNT, INDEX, SOME_WEIGHT, above, at_least
from hybridflow.recipe.signature import Option, Signature

_FUNCTIONS: dict[str, Signature] = {
    "group_relative": Signature(
        "GRPO's advantage: reward minus the mean of the prompt's samples, divided by their "
        "standard deviation when algorithm.normalize_by_std is set.",
        {"rewards": takes(REWARD_VALUES)},
        {"advantages": ADVANTAGES},
        compares_samples=True,
        settings=("normalize_by_std",),
    ),
    "rloo": Signature(
        "RLOO's advantage: reward minus the mean of the prompt's other samples.",
        {"rewards": takes(REWARD_VALUES)},
        {"advantages": ADVANTAGES},
        compares_samples=True,
    ),
    "remax": Signature(
        "ReMax's advantage: reward minus the prompt's baseline, the reward of its greedy response.",
        {
            "rewards": takes(REWARD_VALUES),
            "baseline": takes(PROMPT_VALUES, description="reward to compare with"),
        },
        {"advantages": ADVANTAGES},
    ),
    "opo": Signature(
        "OPO's advantage: reward minus the mean of the prompt's samples, weighted by length.",
        {"rewards": takes(REWARD_VALUES), "responses": takes(RESPONSES)},
        {"advantages": ADVANTAGES},
        compares_samples=True,
    ),
    "gpg": Signature(
        "GPG's advantage: reward minus the mean of the prompt's samples, scaled up by the share "
        "of prompts whose rewards are all equal.",
        {"rewards": takes(REWARD_VALUES)},
        {"advantages": ADVANTAGES},
        compares_samples=True,
    ),
    "gdpo": Signature(
        "GDPO's advantage of several rewards: each normalised within its prompt's samples, summed "
        "with weights, then normalised over the batch.",
        {
            "first": takes(REWARD_VALUES),
            "second": takes(REWARD_VALUES),
            "third": takes(REWARD_VALUES, optional=True),
            "fourth": takes(REWARD_VALUES, optional=True),
        },
        {"advantages": ADVANTAGES},
        {
            "weights": Option(
                "list of float",
                description="one weight per reward; default: all 1",
                rule=SOME_WEIGHT,
            )
        },
        compares_samples=True,
    ),
    "reinforce_pp": Signature(
        "REINFORCE++'s advantage: the discounted return of every token, normalised over all "
        "tokens of the batch; every token's reward is less by its KL where algorithm.kl.place is "
        "reward.",
        {
            "rewards": takes(REWARD_VALUES),
            "responses": takes(RESPONSES),
            "logprobs": takes(
                LOGPROBS, optional=True, description="of the policy; needed by the KL"
            ),
            "ref_logprobs": takes(
                LOGPROBS, optional=True, description="of the reference; needed by the KL"
            ),
        },
        {"advantages": TOKEN_ADVANTAGES},
        {
            "gamma": Option("float", 1.0, description="discount per token", rule=DISCOUNT),
        },
    ),
    "reinforce_pp_baseline": Signature(
        "REINFORCE++'s advantage with a baseline: reward minus the mean of the prompt's samples, "
        "normalised over all tokens of the batch.",
        {"rewards": takes(REWARD_VALUES), "responses": takes(RESPONSES)},
        {"advantages": ADVANTAGES},
        compares_samples=True,
    ),
    "token_rewards": Signature(
        "Reward of every token: token_scores where they are given, else the outcome at the "
        "response's last token, less the token's KL where algorithm.kl.place is reward; "
        "algorithm.gae.whiten_rewards scales it.",
        {
            "rewards": takes(REWARD_VALUES, optional=True, description="outcome of each response"),
            "token_scores": takes(
                TOKEN_REWARDS,
                optional=True,
                description="score of each token, from a reward role of level token",
            ),
            "responses": takes(RESPONSES),
            "logprobs": takes(
                LOGPROBS, optional=True, description="of the policy; needed by the KL"
            ),
            "ref_logprobs": takes(
                LOGPROBS, optional=True, description="of the reference; needed by the KL"
            ),
        },
        {"token_rewards": TOKEN_REWARDS},
        {
            "kl_share": Option(
                "float",
                1.0,
                description="times algorithm.kl.coef; negative for a cost",
                rule=at_least(-1, 1),
            ),
            "add_rewards": Option(
                "bool",
                False,
                description="add the outcome, which another role gives, to token_scores",
            ),
        },
        settings=("gae.whiten_rewards",),
    ),
    "gae": Signature(
        "Generalised advantage estimation over a critic's values; settings from algorithm.gae.",
        {"token_rewards": takes(TOKEN_REWARDS), "values": takes(VALUES)},
        {"advantages": TOKEN_ADVANTAGES, "returns": RETURNS},
        {
            "whiten": Option(
                "bool", description="overrides algorithm.gae.whiten_advantages for this node"
            )
        },
        settings=("gae.gamma", "gae.lam", "gae.whiten_advantages"),
    ),
    "prime": Signature(
        "PRIME's advantage: the return of implicit process rewards, algorithm.preference.beta * "
        "(prm_logprobs - ref_logprobs), and the outcome, each less the mean of the prompt's other "
        "samples.",
        {
            "rewards": takes(REWARD_VALUES),
            "prm_logprobs": takes(LOGPROBS, description="under the process reward model"),
            "ref_logprobs": takes(LOGPROBS, description="under the model that it began from"),
        },
        {"advantages": TOKEN_ADVANTAGES},
        {"gamma": Option("float", 1.0, description="discount per token", rule=DISCOUNT)},
        compares_samples=True,
        settings=("preference.beta",),
    ),
    "outcome_labels": Signature(
        "Which responses are good: those whose reward is above a bound.",
        {"rewards": takes(REWARD_VALUES)},
        {"labels": LABELS},
        {"above": Option("float", 0.5, description="reward above which a response is good")},
    ),
    "lagrangian": Signature(
        "Safe RLHF's advantage: (A - lambda * A of the cost) / (1 + lambda); lambda is a live "
        "value that algorithm.lagrangian moves by the step's mean cost.",
        {
            "advantages": takes(TOKEN_ADVANTAGES, description="of the reward, not whitened"),
            "cost_advantages": takes(TOKEN_ADVANTAGES, description="of the cost, not whitened"),
            "costs": takes(REWARD_VALUES, description="cost of each response"),
        },
        {"combined": TOKEN_ADVANTAGES},
        settings=("lagrangian", "gae.whiten_advantages"),
    ),
    "shuffle": Signature(
        "Permute the values over all samples of the step: a control that must not learn.",
        {"values": takes(field_type(Axis.SAMPLES, "float", "values to permute"))},
        {"shuffled": field_type(Axis.SAMPLES, "float", "the same values on other samples")},
        {"seed": Option("int", 0, description="seed of the permutations", rule=INDEX)},
    ),
    "prompt_mean": Signature(
        "Mean of a value over the samples of each prompt.",
        {"values": takes(field_type(Axis.SAMPLES, "float", "a value of each sample"))},
        {"means": PROMPT_VALUES},
    ),
    "weighted_sum": Signature(
        "Combine two values of each sample: weights[0] * first + weights[1] * second.",
        {
            "first": takes(field_type(Axis.SAMPLES, "float", "first value of each sample")),
            "second": takes(field_type(Axis.SAMPLES, "float", "second value of each sample")),
        },
        {"total": field_type(Axis.SAMPLES, "float", "weighted sum of each sample")},
        {
            "weights": Option(
                "list of float", [1.0, 1.0], description="two weights", rule=SOME_WEIGHT
            )
        },
    ),
    "soft_overlong": Signature(
        "DAPO's soft punishment of long responses: the reward falls by up to factor over the last "
        "buffer tokens before roles.rollout.sampling.max_tokens.",
        {"rewards": takes(REWARD_VALUES), "responses": takes(RESPONSES)},
        {"shaped": field_type(Axis.SAMPLES, "float", "reward less the punishment")},
        {
            "buffer": Option(
                "int",
                description="tokens over which it falls; null: a fifth of max_tokens",
                rule=COUNT,
            ),
            "factor": Option(
                "float", 1.0, description="punishment of the longest responses", rule=above(0)
            ),
        },
    ),
    "rotate_responses": Signature(
        "Each prompt's responses as those of the next prompt, as KTO's baseline needs them.",
        {
            "responses": takes(RESPONSES),
            "response_mask": takes(RESPONSE_MASK, optional=True),
        },
        {"rotated": RESPONSES, "rotated_mask": RESPONSE_MASK},
    ),
    "reverse_kl": Signature(
        "On-policy distillation's advantage: the teacher's log-probability of every sampled token "
        "less the student's, whose mean is minus the reverse KL.",
        {
            "logprobs": takes(LOGPROBS, description="of the student, which sampled"),
            "teacher_logprobs": takes(LOGPROBS, description="of the teacher"),
        },
        {"advantages": TOKEN_ADVANTAGES},
        {"scale": Option("float", 1.0, description="of the advantages", rule=above(0))},
    ),
    "kto_baseline": Signature(
        "KTO's baseline: the mean log-ratio of policy and reference on rotated responses, 0 at "
        "least.",
        {
            "logprobs": takes(LOGPROBS),
            "ref_logprobs": takes(LOGPROBS),
            "response_mask": takes(RESPONSE_MASK, optional=True),
        },
        {"kl_baseline": KL_BASELINE},
    ),
    "accumulate_signal": Signature(
        "Keep the prompts whose samples have different rewards, over the rounds of a "
        "`repeat_until`, until the step's number of prompts is reached (DAPO).",
        {
            "prompts": takes(PROMPTS),
            "responses": takes(RESPONSES),
            "rollout_logprobs": takes(LOGPROBS),
            "rewards": takes(REWARD_VALUES),
            "finished": takes(FINISHED, optional=True),
            "token_versions": takes(TOKEN_VERSIONS, optional=True),
        },
        {
            "kept_prompts": PROMPTS,
            "kept_responses": RESPONSES,
            "kept_rollout_logprobs": LOGPROBS,
            "kept_rewards": REWARD_VALUES,
            "kept_finished": FINISHED,
            "kept_token_versions": TOKEN_VERSIONS,
            "enough": field_type(Axis.RUN, "bool", "whether enough prompts were kept"),
        },
        fresh_batch=True,
    ),
}

FUNCTIONS = Registry(
    "function",
    _FUNCTIONS,
    aliases={
        "grpo": "group_relative",
        "leave_one_out": "rloo",
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    },
)
