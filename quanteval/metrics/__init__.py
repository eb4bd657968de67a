"""Statistics recomputed from raw observations: latency from traces, quality from scores."""
