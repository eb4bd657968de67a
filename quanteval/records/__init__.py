"""What is written to disk: pydantic models with units in their names.

Raw observations are stored and every statistic is recomputed from them. Readers ignore fields
they do not know (a later version may add some) and refuse a record that lacks one they need.
"""

from quanteval.records.base import (
    SCHEMA_VERSION,
    FinishReason,
    Outcome,
    Part,
    Record,
    SampleStatus,
    VariantStatus,
    VerdictOutcome,
)
from quanteval.records.measurements import (
    ClientHealth,
    LoadPointRecord,
    MachinePeaks,
    RequestTrace,
    UtilizationSample,
)
from quanteval.records.runs import Manifest
from quanteval.records.scores import Score, SequentialLook, TaskRecord
from quanteval.records.variants import (
    Artifact,
    CalibrationRecord,
    Effective,
    LayerClass,
    MemoryUse,
    ModelShape,
    Precision,
    StageRecord,
    VariantResult,
)
from quanteval.records.verdicts import VERDICT_EXIT_CODES, Finding, Verdict

__all__ = [
    "SCHEMA_VERSION",
    "VERDICT_EXIT_CODES",
    "Artifact",
    "CalibrationRecord",
    "ClientHealth",
    "Effective",
    "Finding",
    "FinishReason",
    "LayerClass",
    "LoadPointRecord",
    "MachinePeaks",
    "Manifest",
    "MemoryUse",
    "ModelShape",
    "Outcome",
    "Part",
    "Precision",
    "Record",
    "RequestTrace",
    "SampleStatus",
    "Score",
    "SequentialLook",
    "StageRecord",
    "TaskRecord",
    "UtilizationSample",
    "VariantResult",
    "VariantStatus",
    "Verdict",
    "VerdictOutcome",
]
