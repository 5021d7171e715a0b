"""Functions and losses of the user's own, from a module that a recipe's ``imports`` names.

Each becomes known to the checks of recipes and to what runs it, so that it is named, checked and
explained like those that ship.
"""

import inspect
from collections.abc import Callable

import torch

from hybridflow.algorithms.functions import FUNCTIONS, Function
from hybridflow.algorithms.losses import LOSSES, Loss, Sequences, TokenInputs, TokenLoss
from hybridflow.recipe import catalogue
from hybridflow.recipe.catalogue_losses import LossEntry
from hybridflow.recipe.signature import Signature

TokenFunction = Callable[[TokenInputs], TokenLoss]


def register_function(
    name: str, signature: Signature, *aliases: str
) -> Callable[[Function], Function]:
    """A decorator: the function ``(batch, context, **options) -> {output: data}`` is ``name``.

    Args:
        signature: what it takes, gives and can be told; the options are its further parameters.

    Raises:
        ValueError: the name is taken, or signature and function do not fit.
    """

    def register(function: Function) -> Function:
        options = list(inspect.signature(function).parameters)[2:]
        if options != list(signature.options):
            raise ValueError(
                f"the function '{name}' takes (batch, context), then {options}, and its signature "
                f"has the options {list(signature.options)}; give both the same, in one order"
            )
        catalogue.FUNCTIONS.register(name, signature, *aliases)
        FUNCTIONS.register(name, function, *aliases)
        return function

    return register


def register_loss(
    name: str, entry: LossEntry, *aliases: str
) -> Callable[[TokenFunction], TokenFunction]:
    """A decorator: the function ``TokenInputs -> TokenLoss`` is the loss ``name`` of tokens.

    It is called with the tokens of one pack, whose responses are whole, and is tried here on a few
    tokens: the metrics that it gives then are those that it reports.

    Args:
        entry: what it needs and reads.

    Raises:
        ValueError: the name is taken, or the loss of a few tokens is not one differentiable number
            each.
    """
    if entry.samples is not None:
        raise ValueError(f"the loss '{name}': a loss of one's own is of tokens, without `samples`")

    def register(function: TokenFunction) -> TokenFunction:
        metrics = _try(name, function)
        needs_advantages = "advantages" in entry.needs
        told = (entry.compares_policies, entry.whole_sequences)
        catalogue.LOSSES.register(name, entry, *aliases)
        LOSSES.register(name, Loss(function, needs_advantages, metrics, *told), *aliases)
        return function

    return register


def _try(name: str, function: TokenFunction) -> tuple[str, ...]:
    """The names of the metrics that the loss gives, of two responses of three tokens and one."""
    lengths_S = torch.tensor([3, 1])
    index_T = torch.repeat_interleave(lengths_S)
    logprobs_T = torch.tensor([-0.1, -2.0, -1.0, -0.5], requires_grad=True)
    old_logprobs_T = torch.tensor([-0.2, -1.0, -1.0, -0.7])
    advantages_T = torch.tensor([1.0, -0.5])[index_T]
    inputs = TokenInputs(
        logprobs_T, old_logprobs_T, advantages_T, sequences=Sequences(index_T, lengths_S)
    )
    try:
        with torch.enable_grad():
            result = function(inputs)
            metrics = tuple(result.sums)
            Loss(lambda _: result, False, metrics)(inputs)
    except Exception as error:
        raise ValueError(f"the loss '{name}' fails on four tokens: {error!r}") from error
    return metrics
