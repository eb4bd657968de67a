"""Runs generated Python functions against their tests, without trusting them.

The tests run in one process, the function in another that holds nothing else; between them only exact
builtin values cross. docs/sandbox.md says what this protects from and what it does not.
"""

from quanteval.sandbox.probing import Level, probe
from quanteval.sandbox.runner import LAYERS, Limits, Outcome, OutcomeStatus, Problem, Sandbox

__all__ = ["LAYERS", "Level", "Limits", "Outcome", "OutcomeStatus", "Problem", "Sandbox", "probe"]
