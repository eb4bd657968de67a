"""What a run was asked to do."""

from __future__ import annotations

from typing import Any

from quanteval.records.base import Record


class Manifest(Record):
    """manifest.json: what a run was asked to do, where and by which versions."""

    run_id: str
    created_at: str
    command: list[str]
    config: dict[str, Any]
    """The resolved configuration; values of secret-looking keys never appear."""
    baseline: str
    variants: list[str]
    """In the order asked, the baseline first."""
    tasks: list[str]
    again: str = ""
    """The baseline's repetition, whose disagreement with it is the noise floor; empty when there is none."""
    policy_name: str
    policy: dict[str, Any]
    environment: dict[str, Any]
    fingerprint: str
