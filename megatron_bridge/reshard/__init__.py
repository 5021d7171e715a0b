"""From a trainer's layout to a rollout engine's: who sends which box to whom. Imports no torch.

``plan`` lists the copies of one engine, ``route`` chooses who sends them to which engines,
``inverse`` is the way back; ``hybrid_engine`` places engines on the trainer's own devices.
Moving the elements is ``megatron_bridge.reshard_moves``' part.
"""

from megatron_bridge.reshard.copies import Copy, View
from megatron_bridge.reshard.inverse import inverse
from megatron_bridge.reshard.plan import ReshardPlan, plan
from megatron_bridge.reshard.routes import Routes, route
from megatron_bridge.reshard.senders import Seat
from megatron_bridge.reshard.targets import Fill, TargetParameter
from megatron_bridge.reshard.traffic import LINKS, LinkBytes, Traffic

__all__ = [
    "LINKS",
    "Copy",
    "Fill",
    "LinkBytes",
    "ReshardPlan",
    "Routes",
    "Seat",
    "TargetParameter",
    "Traffic",
    "View",
    "inverse",
    "plan",
    "route",
]
