"""Continuous batching: scheduler, jitted step, and the engine that joins them."""

from paged_jax.engine.engine import Engine

__all__ = ["Engine"]
