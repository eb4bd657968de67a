"""Where downloaded and converted models and built artifacts are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/quanteval, by default ~/.cache/quanteval."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quanteval"
