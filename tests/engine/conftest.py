"""The toy model run alone."""

import pytest

from tests.engine.harness import Alone


@pytest.fixture(scope="session")
def alone(toy) -> Alone:
    """Callable (prompt, params) -> token ids."""
    return Alone(toy)
