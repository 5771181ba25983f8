"""What the race detector of TPU interpret mode found."""

# The public API of JAX 0.10.2 only prints races.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call


def races_found() -> bool:
    """Whether the last interpreted kernel raced; from JAX 0.12 on, one that does also raises.

    Raises: AssertionError when the last kernel was not run by the race detector.
    """
    assert interpret_pallas_call.races is not None, "no kernel was searched for races"
    return interpret_pallas_call.races.races_found
