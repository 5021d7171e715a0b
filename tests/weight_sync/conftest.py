"""Fixtures of the deltas' tests."""

from tests.weight_sync.delta_cases import local, shared, source, three, writer

__all__ = ["local", "shared", "source", "three", "writer"]
