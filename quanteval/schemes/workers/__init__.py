"""Scripts that quantize in another environment: they import the standard library and that environment's alone."""
