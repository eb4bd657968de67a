"""What every record shares: schema version, and NaN that survives the round trip."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1

SampleStatus = Literal["ok", "timeout", "error", "truncated"]
FinishReason = Literal["stop", "length", "error", "cancelled", "none"]
VariantStatus = Literal["running", "ok", "unsupported", "failed", "out_of_memory", "interrupted"]
Outcome = Literal["accept", "reject", "inconclusive", "invalid", "skipped"]
VerdictOutcome = Literal["accept", "reject", "inconclusive", "error", "not_comparable"]


class Part(BaseModel):
    """A piece of a record. NaN and infinities survive the round trip, as strings."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="strings", frozen=True)


class Record(Part):
    """A file, or a line of a journal."""

    schema_version: int = SCHEMA_VERSION
