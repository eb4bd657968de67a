"""quanteval decides whether a quantized language model may ship."""

__version__ = "0.1.0"
