"""PagedAttention for JAX: a functional paged KV cache and an inference engine on top of it.

Importing this package loads neither jax nor flax; names are resolved on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_jax.async_llm import AsyncLLM
    from paged_jax.beam_search_params import BeamSearchParams
    from paged_jax.config import EngineConfig
    from paged_jax.engine import Engine
    from paged_jax.llm import LLM
    from paged_jax.outputs import CompletionOutput, Logprob, RequestOutput
    from paged_jax.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "paged_jax.llm",
    "AsyncLLM": "paged_jax.async_llm",
    "SamplingParams": "paged_jax.sampling_params",
    "BeamSearchParams": "paged_jax.beam_search_params",
    "RequestOutput": "paged_jax.outputs",
    "CompletionOutput": "paged_jax.outputs",
    "Logprob": "paged_jax.outputs",
    "Engine": "paged_jax.engine",
    "EngineConfig": "paged_jax.config",
}

__all__ = [  # noqa: RUF022 - the order of docs/api.md
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "BeamSearchParams",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "Engine",
    "EngineConfig",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
