"""Pure tensor functions of the algorithms: no ray, no megatron, no server."""

from hybridflow.algorithms.aggregation import AGGREGATIONS
from hybridflow.algorithms.functions import FUNCTIONS, FunctionContext
from hybridflow.algorithms.kl import ESTIMATORS
from hybridflow.algorithms.losses import LOSSES
from hybridflow.algorithms.losses.preference import PREFERENCES
from hybridflow.algorithms.registering import register_function, register_loss
from hybridflow.algorithms.values import VALUE_LOSSES

__all__ = [
    "AGGREGATIONS",
    "ESTIMATORS",
    "FUNCTIONS",
    "LOSSES",
    "PREFERENCES",
    "VALUE_LOSSES",
    "FunctionContext",
    "register_function",
    "register_loss",
]
