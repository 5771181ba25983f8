"""What the race detector of TPU interpret mode found."""

import pytest

# What JAX 0.10.2 prints for each race; its record of races is private.
MESSAGE = "RACE DETECTED"


def races_found(capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether kernels raced since the last call; from JAX 0.12 on, one that does also raises.

    Read the kernel's output first: kernels run asynchronously.
    """
    return MESSAGE in capsys.readouterr().out
