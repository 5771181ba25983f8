"""What the compiles of several files share."""

import jax
import pytest


@pytest.fixture
def optimized():
    """The programs that are served; tests/conftest.py turns this on for all other tests."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
