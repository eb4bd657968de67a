"""Quantization schemes: one file a family, each scheme a frozen dataclass that is its own config."""
