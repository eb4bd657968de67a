"""Runs generated Python functions against their tests, without trusting them.

The tests run in one process, the function in another that holds nothing else; between them only exact
builtin values cross. docs/sandbox.md says what this protects from and what it does not.
"""

from quanteval.sandbox.runner import Level, Limits, Outcome, OutcomeStatus, Problem, Sandbox, probe

__all__ = ["Level", "Limits", "Outcome", "OutcomeStatus", "Problem", "Sandbox", "probe"]
