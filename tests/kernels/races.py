"""What the race detector of TPU interpret mode found."""

import pytest

# What JAX 0.10.2 prints for each race; its record of races is private.
MESSAGE = "RACE DETECTED"


def races_found(capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether kernels raced since the last call; from JAX 0.12 on, one that does also raises.

    Read the kernel's output first: kernels run asynchronously.
    """
    return MESSAGE in capsys.readouterr().out


def assert_orderly(capsys: pytest.CaptureFixture[str]) -> None:
    """Asserts that no copy raced since the last call, and none was left that nobody waits for.

    A copy that happens when it is started shows a missing wait by the second alone. Read the
    kernel's output first: kernels run asynchronously.
    """
    printed = capsys.readouterr().out
    assert MESSAGE not in printed
    assert "non-zero count" not in printed, "a semaphore is not zero when the kernel ends"
