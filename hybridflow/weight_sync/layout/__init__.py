"""A server's own parameter layout, declared as boxes of HuggingFace tensors. Imports no torch.

SGLang fuses q, k and v into one parameter, gate and up into another, stacks experts, pads the
vocabulary and (on the CPU) intermediate sizes, and splits all of it over its ranks. The local
engine keeps exactly the layout of a CPU server with one rank. Knowing it lets a trainer write a
server's parameters, and compute the digest of them, without asking the server for a byte.
"""

from hybridflow.weight_sync.layout.parameters import (
    check,
    elements,
    hf_shapes,
    server_parameters,
)
from hybridflow.weight_sync.layout.tables import TABLES

FAMILIES = tuple(TABLES)

__all__ = ["FAMILIES", "check", "elements", "hf_shapes", "server_parameters"]
