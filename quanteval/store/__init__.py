"""What is on disk: whole files, journals, run directories, and reuse between runs."""

from quanteval.store.files import (
    Journal,
    canonical_json,
    device_lock,
    file_lock,
    file_sha256,
    fingerprint,
    read_journal,
    read_record,
    write_atomic,
    write_record,
)
from quanteval.store.reuse import adopt_stage, remember_stage, reuse_stage, stage_files
from quanteval.store.run import (
    RunDirectory,
    VariantDirectory,
    done_samples,
    load_baseline,
    load_evidence,
    read_scores,
)

__all__ = [
    "Journal",
    "RunDirectory",
    "VariantDirectory",
    "adopt_stage",
    "canonical_json",
    "device_lock",
    "done_samples",
    "file_lock",
    "file_sha256",
    "fingerprint",
    "load_baseline",
    "load_evidence",
    "read_journal",
    "read_record",
    "read_scores",
    "remember_stage",
    "reuse_stage",
    "stage_files",
    "write_atomic",
    "write_record",
]
