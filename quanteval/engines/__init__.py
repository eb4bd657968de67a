"""Engines: one file a server; `transformers` runs in this process, `fake` needs no model at all."""
