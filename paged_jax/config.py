"""Engine options: what a user may set, and what they are settled to."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from paged_jax.shapes import ceil_div

# What pools are called here and by vLLM and JAX; None is the dtype of the model.
_KV_CACHE_DTYPES = {
    "auto": None,
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e5m2": "float8_e5m2",
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of `LLM`; None means that `LLM` chooses."""

    dtype: str = "auto"
    max_model_len: int | None = None
    """Most tokens of a request, prompt and output; None: 2048 or less where the model has less."""
    block_size: int | None = None
    """Token positions per KV block; None: 16 (on TPU 64 or 128)."""
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    """Fraction of an accelerator's memory to use where neither of the two above is given."""
    max_num_seqs: int = 256
    """Most requests that run at once."""
    max_num_batched_tokens: int | None = None
    """Most tokens per dispatch; longer prompts run in chunks. None: 2048 (512 on CPU)."""
    seed: int = 0
    """Seeds the requests that bring no seed, in order of submission."""
    warmup: Literal["lazy", "all"] = "lazy"
    """When programs are compiled: as they are needed, or all at once."""
    strict_compile: bool = False
    """Raise if anything compiles after `warmup="all"`."""
    debug: bool = False
    """Audit the block state and compare it with the ledger after every dispatch."""
    enable_prefix_caching: bool = True
    """Keep the KV of full blocks for later requests that begin with the same tokens."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """"priority": requests of a lower number first, each number in order of arrival."""
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"
    """What happens to the KV of a request that loses its row: computed again, kept on the host
    while `swap_space` lasts, or whichever has been cheaper so far."""
    swap_space: float = 4.0
    """GiB of host memory for swapped requests."""
    decode_steps: int = 8
    """Most decode steps per dispatch, while no prompt is being computed and blocks last."""
    overlap: bool = True
    """Plan and issue a dispatch before the tokens of the one before have been read."""
    max_step_retries: int = 2
    """Failures in a row, without a token in between, after which the requests of a dispatch end."""
    kv_cache_dtype: str = "auto"
    """Of keys and values in the pool: the model's; "float32", "bfloat16", "float16"; or "int8",
    "fp8_e4m3" ("fp8") or "fp8_e5m2" with a scale per token and head."""
    tensor_parallel_size: int = 1
    """Devices among which heads, MLP and vocabulary are divided."""

    def __post_init__(self) -> None:
        for name in ("strict_compile", "debug", "enable_prefix_caching", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} ({getattr(self, name)!r}) must be True or False")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed ({self.seed!r}) must be an integer")
        _check_positive("max_num_seqs", self.max_num_seqs)
        _check_positive("decode_steps", self.decode_steps)
        _check_positive("tensor_parallel_size", self.tensor_parallel_size)
        for name, allowed in (
            ("scheduling_policy", ("fcfs", "priority")),
            ("preemption_mode", ("recompute", "swap", "auto")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} ({getattr(self, name)!r}) must be one of {', '.join(allowed)}"
                )
        given = self.kv_cache_dtype
        if not isinstance(given, str) or given not in _KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype ({given!r}) must be one of {', '.join(_KV_CACHE_DTYPES)}"
            )
        space = self.swap_space
        if isinstance(space, bool) or not isinstance(space, (int, float)) or not space >= 0:
            raise ValueError(f"swap_space ({space!r}) must be a number of GiB of at least 0")
        retries = self.max_step_retries
        if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
            raise ValueError(f"max_step_retries ({retries!r}) must be an integer of at least 0")
        for name in (
            "max_model_len",
            "block_size",
            "num_blocks",
            "kv_cache_memory_bytes",
            "max_num_batched_tokens",
        ):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.max_model_len == 1:
            raise ValueError("max_model_len (1) must be at least 2: a prompt and an output token")
        tokens = self.max_num_batched_tokens
        if tokens is not None and tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if self.strict_compile and self.warmup != "all":
            raise ValueError("strict_compile needs warmup='all'")
        fraction = self.gpu_memory_utilization
        if not isinstance(fraction, (int, float)) or not 0.0 < fraction <= 1.0:
            raise ValueError(f"gpu_memory_utilization ({fraction!r}) must be a number in (0, 1]")
        if self.warmup not in ("lazy", "all"):
            raise ValueError(f"warmup ({self.warmup!r}) must be 'lazy' or 'all'")

    @property
    def kv_dtype(self) -> str | None:
        """Name in JAX of `kv_cache_dtype`; None for that of the model."""
        return _KV_CACHE_DTYPES[self.kv_cache_dtype]

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "EngineConfig":
        """Builds a config from keyword options.

        Raises: ValueError for an unknown option; the message lists the known ones.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option {name!r}; options: {', '.join(known)}")
        return cls(**options)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """Options with every choice made: what scheduler and step are built from."""

    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "recompute"
    enable_prefix_caching: bool = False
    decode_steps: int = 1
    swap_blocks: int = 0
    """Blocks that fit into `swap_space`."""

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks per table row M."""
        return ceil_div(self.max_model_len, self.block_size)


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} ({value!r}) must be an integer of at least 1")
