"""Property tests here do arithmetic only; on a busy machine a single example may still be slow."""

from hypothesis import settings

settings.register_profile("statistics", deadline=None)
settings.load_profile("statistics")
