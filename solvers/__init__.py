"""The rematerialization problem as plain integers, and the solvers that share one signature."""

from .problem import BoundClass, Limits, Op, Problem, Solution, Status

__all__ = ["BoundClass", "Limits", "Op", "Problem", "Solution", "Status"]
