"""HTTP servers of our own: an OpenAI-compatible front on any session, and a mock with set timings."""
