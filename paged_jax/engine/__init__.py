"""Continuous batching: scheduler, jitted step, and the engine that joins them.

Importing it loads no JAX, so that scheduler and ledger can be replayed without.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        return importlib.import_module("paged_jax.engine.engine").Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
