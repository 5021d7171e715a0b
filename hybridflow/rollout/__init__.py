"""Rollout servers: SGLang's protocol, its client and launcher, and the local engine."""

from hybridflow.rollout.client import RolloutClient, RolloutError, RolloutTimeout
from hybridflow.rollout.launch import Server, ServerConfig, ServerDied, start_server
from hybridflow.rollout.protocol import Sample, Sampling

__all__ = [
    "RolloutClient",
    "RolloutError",
    "RolloutTimeout",
    "Sample",
    "Sampling",
    "Server",
    "ServerConfig",
    "ServerDied",
    "start_server",
]
