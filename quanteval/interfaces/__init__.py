"""The seams: what crosses from one part of the pipeline to another, in memory.

Schemes, engines, benches, tasks and rules are written against this module and against `records`
alone, never against each other. Nothing here touches torch, files or the network.
"""

from quanteval.interfaces.measuring import Bench, Sample, Task, TaskContext
from quanteval.interfaces.models import Calibration, ModelSource, Scheme
from quanteval.interfaces.requests import (
    Chunk,
    Completion,
    HiddenStates,
    Message,
    OutputHead,
    Prompt,
    Request,
    Sampling,
    ScoreRequest,
    Tokenizer,
    TokenLogprobs,
    TopLogprobs,
    hash_token_ids,
)
from quanteval.interfaces.sessions import (
    Engine,
    GivesTopLogprobs,
    OwnsProcesses,
    Session,
    StreamsAsync,
    TellsMetrics,
    WatchesDevice,
)

__all__ = [
    "Bench",
    "Calibration",
    "Chunk",
    "Completion",
    "Engine",
    "GivesTopLogprobs",
    "HiddenStates",
    "Message",
    "ModelSource",
    "OutputHead",
    "OwnsProcesses",
    "Prompt",
    "Request",
    "Sample",
    "Sampling",
    "Scheme",
    "ScoreRequest",
    "Session",
    "StreamsAsync",
    "Task",
    "TaskContext",
    "TellsMetrics",
    "TokenLogprobs",
    "Tokenizer",
    "TopLogprobs",
    "WatchesDevice",
    "hash_token_ids",
]
