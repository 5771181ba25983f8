"""Other weights under a running engine, and an engine that gives its memory back for a while.

The engine calls these between two steps, when nothing that was issued is unread.
"""

from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine

Running = Literal["error", "recompute", "abort"]
"""What becomes of requests that have begun when the weights change."""


def update_weights(engine: "Engine", params: Any, running: Running) -> None:
    """See `Engine.update_weights`."""
    if running not in get_args(Running):
        raise ValueError(f"running ({running!r}) must be one of {', '.join(get_args(Running))}")
    fitting = engine.runner.fit(params)
    begun = [r for r in engine._requests.values() if r.first_scheduled_time is not None]
    if begun and running == "error":
        raise RuntimeError(
            f"{len(begun)} requests have begun: finish them first, or choose running='recompute' "
            "or 'abort'"
        )
    if running == "abort":
        for request in begun:
            engine._early.append(engine._finish(request, "abort"))
    # Whatever was computed with the old weights is not used again: neither rows, images nor cache.
    engine.state.restart(engine._requests.values())
    engine.dispatcher.images.clear()
    if (cache := engine.state.cache) is not None:
        cache.set_version(cache.version + 1)
    engine.runner.set_params(fitting)


def sleep(engine: "Engine", level: int) -> None:
    """See `Engine.sleep`."""
    if level not in (1, 2):
        raise ValueError(f"level ({level!r}) must be 1 (free the KV pool) or 2 (the weights too)")
    engine.runner.sleep(keeps_params=level == 1 and engine.runner.has_params)
    engine._renew()


def wake_up(engine: "Engine", params: Any) -> None:
    """See `Engine.wake_up`."""
    if params is not None:
        update_weights(engine, params, "recompute")
    if not engine.runner.has_params:
        raise RuntimeError("the weights were freed: give them back with wake_up(params)")
    if engine.runner.is_asleep:
        engine.runner.wake_up()
