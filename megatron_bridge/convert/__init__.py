"""Streaming conversion under a memory bound: a plan of units, workers, a journal, one rename."""
