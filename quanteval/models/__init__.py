"""From a model's name to weights on this machine: preset, folder, GGUF file or hub id."""

from quanteval.models.resolve import ModelName, classify, resolve_model

__all__ = ["ModelName", "classify", "resolve_model"]
