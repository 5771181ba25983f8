"""Paged attention for GPU: Triton for every JAX, Mosaic GPU where JAX has it."""
