"""The errors a user can meet, and the exit code each leads to.

    QuantevalError                 1  something failed that is not the user's input
    |-- ConfigError                2  bad option, policy, task file or path
    |-- UnsupportedError           1  this scheme, engine or device cannot do it here (a cell's status, not a crash)
    |-- EngineError                1  a served model failed while answering
    |-- RecordError                1  a stored record is missing, torn or unreadable
    |-- EvidenceError              1  records exist but hold no usable evidence (empty, all errors, NaN)
    `-- NotComparableError         5  two variants were not measured under the same conditions

Every message is one line: what, the offending value in quotes, what is allowed or what to do.
"""


class QuantevalError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class ConfigError(QuantevalError):
    """The user's input is wrong; the message names the value and what is allowed."""

    exit_code = 2


class UnsupportedError(QuantevalError):
    """A scheme, engine or device combination cannot run here; the message says why and what would help."""


class EngineError(QuantevalError):
    """A served model failed while answering."""


class RecordError(QuantevalError):
    """A stored record is missing, torn or unreadable."""


class EvidenceError(QuantevalError):
    """Records exist but hold nothing a verdict could rest on."""


class NotComparableError(QuantevalError):
    """Two variants differ in more than the scheme, so comparing them would mislead."""

    exit_code = 5
