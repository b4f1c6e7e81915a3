"""Passes, one a file, each a function: analyses of the graph, and its rewriting to a plan."""

from .memory import MemoryProfile, alive_at, profile

__all__ = ["MemoryProfile", "alive_at", "profile"]
