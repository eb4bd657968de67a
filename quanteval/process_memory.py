"""What this process's resident memory consists of, read from the kernel and from the C library's allocator.

Linux with glibc; elsewhere a snapshot is None and the account keeps the parts known from tensors. The
account explains the peak of a phase by a snapshot at its end, taken before freed pages are given back.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quanteval.environment import rss_bytes
from quanteval.records import MemoryUse

MAPPING = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<perms>\S+) \S+ \S+ \d+\s*(?P<path>.*)$"
)
WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".pt")
HEAP_MAX = 64 << 20
"""glibc aligns the heaps of its thread arenas to this many bytes (HEAP_MAX_SIZE on 64-bit systems)."""


@dataclass(frozen=True)
class Mappings:
    """Resident bytes by kind of mapping; they add up to the resident memory."""

    library: int
    """File pages of programs, libraries and data, changed copies included."""
    weight_file: int
    malloc: int
    """The main heap and the thread arenas of the C library's allocator."""
    anonymous: int
    """Other anonymous memory: large buffers of the allocator, Python's arenas, stacks."""

    @property
    def resident(self) -> int:
        """All of it."""
        return self.library + self.weight_file + self.malloc + self.anonymous


@dataclass(frozen=True)
class ProcessMemory:
    """Mappings, and what the allocator says of itself, at one moment."""

    mappings: Mappings
    in_use: int
    """Bytes of the allocator's heaps that the program holds."""
    large: int
    """Bytes in large buffers with a mapping each, all of them held by the program."""
    peak: int
    """Highest resident memory since the last reset."""

    @property
    def held(self) -> int:
        """Anonymous memory that the program holds: in the heaps, in large buffers, in Python's arenas, in stacks."""
        return min(self.in_use, self.mappings.malloc) + self.mappings.anonymous

    @property
    def freed(self) -> int:
        """Resident pages of the heaps that the program gave back to the allocator."""
        return max(0, self.mappings.malloc - self.in_use)

    @property
    def returned(self) -> int:
        """Resident at the peak and given back to the system since."""
        return max(0, self.peak - self.mappings.resident)


def parse_smaps(lines: Iterable[str]) -> Mappings:
    """Sum the resident bytes of /proc/<pid>/smaps by kind."""
    total = dict.fromkeys(("library", "weight_file", "malloc", "anonymous"), 0)
    kind = "anonymous"
    for line in lines:
        if found := MAPPING.match(line):
            kind = _kind(found["path"].strip(), int(found["start"], 16), int(found["end"], 16))
        elif line.startswith("Rss:"):
            total[kind] += int(line.split()[1]) * 1024
    return Mappings(**total)


def _kind(path: str, start: int, end: int) -> str:
    if path == "[heap]":
        return "malloc"
    if path.removesuffix(" (deleted)").endswith(WEIGHT_FILES):
        return "weight_file"
    if path and not path.startswith("["):
        return "library"
    is_arena = not path and start % HEAP_MAX == 0 and end - start <= HEAP_MAX
    return "malloc" if is_arena else "anonymous"


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def snapshot() -> ProcessMemory | None:
    """Return this process's memory now; None where the kernel or the C library does not tell."""
    if sys.platform != "linux":
        return None
    try:
        info = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if info is None:
            return None
        info.restype = _MallocInfo
        told = info()
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None
    return ProcessMemory(
        parse_smaps(lines), int(told.uordblks), int(told.hblkhd), int(peak.split()[1]) * 1024
    )


def mapped_bytes(storages: Mapping[int, int]) -> int | None:
    """Return how many bytes of these buffers (address: size) lie in mapped weight files; None where not told."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    spans = []
    for line in lines:
        found = MAPPING.match(line)
        if found and _kind(found["path"].strip(), 1, 2) == "weight_file":
            spans.append((int(found["start"], 16), int(found["end"], 16)))
    return sum(
        size
        for address, size in storages.items()
        if any(start <= address < end for start, end in spans)
    )


_before_load: list[ProcessMemory | None] = [None]


def note_before_load() -> int:
    """Remember this moment, just before an engine of this process loads a model; return the resident bytes."""
    _before_load[0] = snapshot()
    return rss_bytes()


def before_load() -> ProcessMemory | None:
    """Return what `note_before_load` saw last, None when no engine of this process did so."""
    return _before_load[0]


# --------------------------------------------------------------------------- the account


def explain_peak(
    use: MemoryUse,
    before: ProcessMemory | None,
    phases: Mapping[str, ProcessMemory | None],
    serving: Iterable[str],
) -> MemoryUse:
    """Fill in the parts of the highest peak among the phases named `serving`.

    `before` is a snapshot from before the load, `phases` those from the end of each phase, before freed
    pages are given back. What the program holds then beyond weights and cache is `runtime_bytes`. What was
    resident at the peak and is freed by then held the activations, and a cache that grows with the requests;
    beyond those it is `allocator_bytes`. Pages of the weights' files that are resident though the weights were
    copied or repacked are `weight_file_bytes`. Without snapshots, or on CUDA, `use` is returned as it is.
    """
    known = {name: taken for name in serving if (taken := phases.get(name)) is not None}
    if use.device != "cpu" or before is None or not known:
        return use
    name, at = max(known.items(), key=lambda item: item[1].peak)
    mapped = use.weights_mapped_bytes
    if mapped is None:
        mapped = min(use.weights_bytes, at.mappings.weight_file)
    is_pool = 0 < use.kv_pool_tokens <= use.kv_cache_tokens
    pool = use.kv_cache_bytes if is_pool else 0
    held = at.held - before.held - (use.weights_bytes - mapped) - pool
    spare = at.freed - before.freed + at.returned - (use.kv_cache_bytes - pool)
    filled = use.model_copy(
        update={
            "account_phase": name,
            "before_load_bytes": before.mappings.resident,
            "library_bytes": at.mappings.library - before.mappings.library,
            "weights_mapped_bytes": mapped,
            "weight_file_bytes": max(0, at.mappings.weight_file - mapped),
            "runtime_bytes": max(0, held),
            "allocator_bytes": max(0, spare - use.activation_peak_bytes),
            "process_peak_bytes": at.peak,
        }
    )
    return filled.model_copy(update={"unaccounted_bytes": at.peak - sum(filled.parts.values())})
