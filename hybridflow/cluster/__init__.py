"""Ray mechanics that know no algorithm: resource pools, worker groups, transfer protocols, and an
in-process twin of it all. The only package that imports Ray."""

from hybridflow.cluster.errors import (
    CallTimeout,
    ClusterError,
    GroupClosed,
    WorkerDied,
    WorkerError,
)
from hybridflow.cluster.group import WorkerGroup, wait_until_started
from hybridflow.cluster.local_session import LocalSession
from hybridflow.cluster.ranks_session import RanksSession, serve
from hybridflow.cluster.ranks_store import RanksStore
from hybridflow.cluster.ray_session import RaySession
from hybridflow.cluster.session import Pool, Session
from hybridflow.cluster.transfer import (
    DATA_PARALLEL,
    GATHER,
    MINI_BATCHES,
    ONE_TO_ALL,
    ROUND_ROBIN,
    Piece,
    Transfer,
    transfer,
)

__all__ = [
    "DATA_PARALLEL",
    "GATHER",
    "MINI_BATCHES",
    "ONE_TO_ALL",
    "ROUND_ROBIN",
    "CallTimeout",
    "ClusterError",
    "GroupClosed",
    "LocalSession",
    "Piece",
    "Pool",
    "RanksSession",
    "RanksStore",
    "RaySession",
    "Session",
    "Transfer",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "serve",
    "transfer",
    "wait_until_started",
]
