"""Runs a recipe's graph: runner, operations, trainer and the run's folder."""
