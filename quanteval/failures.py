"""What ended a process, as a status and one line."""

from __future__ import annotations

from quanteval.errors import EngineError, QuantevalError, UnsupportedError
from quanteval.records import VariantStatus


def explain(error: BaseException) -> tuple[VariantStatus, str]:
    """Turn whatever ended this process into a status and one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted"
    if isinstance(error, UnsupportedError):
        return "unsupported", one_line(str(error))
    if is_out_of_memory(error):
        return "out_of_memory", one_line(f"out of memory: {error}")
    if isinstance(error, QuantevalError):
        return "failed", one_line(str(error))
    return "failed", one_line(f"{type(error).__name__}: {error}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, whoever raised it."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (
            isinstance(error, RuntimeError | EngineError)
            and ("out of memory" in text or "can't allocate" in text)
        )
    )


def one_line(text: str) -> str:
    """Return the text on one line, at most 400 characters long."""
    first = " ".join(text.split())
    return first if len(first) <= 400 else first[:397] + "..."
