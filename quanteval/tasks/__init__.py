"""Task kinds: one file a kind; the suites themselves are data under tasks/<name>/."""
