"""Measuring plans: what is sent to a session, when, and the raw trace of every request."""
