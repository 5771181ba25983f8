"""`paged-jax bench --simulate`: a trace under every combination of the values given."""

import argparse
import itertools
from typing import Any

from paged_jax.cli import options
from paged_jax.cli.bench import run_log
from paged_jax.config import EngineConfig, ResolvedConfig
from paged_jax.engine.simulate import DispatchCost, simulate
from paged_jax.engine.trace import TraceRequest, read_trace, sharegpt_like

_SHAREGPT = "sharegpt:"
_MAX_MODEL_LEN = 2048
_MAX_NUM_BATCHED_TOKENS = 2048
_BLOCK_SIZE = 16
_REQUEST_RATE = 10.0

# Engine options that act on scheduler and ledger.
_ACT = {
    "max_model_len",
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "decode_steps",
    "enable_prefix_caching",
    "scheduling_policy",
    "seed",
}


def run_grid(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of each combination of policy, block size and pool, with its settings.

    Raises: ValueError for a wrong trace, an engine option that does not act here, or a picture of
      more than one combination.
    """
    given = options.engine_options(arguments)
    unused = sorted(given.keys() - _ACT)
    if unused:
        raise ValueError(f"--{unused[0].replace('_', '-')} does not act with --simulate")
    config = EngineConfig.from_options(given)
    trace = _trace(arguments, config)
    cost = DispatchCost(step_seconds=arguments.step_seconds, token_seconds=arguments.token_seconds)
    if not (cost.step_seconds > 0 and cost.token_seconds >= 0):
        raise ValueError("step-seconds must be above 0 and token-seconds at least 0")
    settings = _settings(arguments, config)
    if len(settings) > 1 and (arguments.timeline or arguments.blocks or arguments.events):
        raise ValueError(
            f"--timeline, --blocks and --events show one run, not {len(settings)}: "
            "give one policy, one pool and one block size"
        )
    rows = []
    for setting in settings:
        with run_log(arguments, setting.max_model_len) as made:
            figures = simulate(trace, setting, cost, made)
        rows.append(
            {
                "policy": setting.scheduling_policy,
                "num_blocks": setting.num_blocks,
                "block_size": setting.block_size,
                **figures,
            }
        )
    return rows


def _trace(arguments: argparse.Namespace, config: EngineConfig) -> list[TraceRequest]:
    name: str = arguments.simulate
    if not name.startswith(_SHAREGPT):
        if arguments.request_rate is not None:
            raise ValueError("--request-rate does not act on a trace from a file")
        return read_trace(name)
    count = name.removeprefix(_SHAREGPT)
    if not count.isdecimal() or not int(count):
        raise ValueError(f"TRACE ({name!r}) must be a file or sharegpt:N with N of at least 1")
    rate = _REQUEST_RATE if arguments.request_rate is None else arguments.request_rate
    return sharegpt_like(
        int(count),
        request_rate=rate,
        seed=config.seed,
        max_model_len=config.max_model_len or _MAX_MODEL_LEN,
    )


def _settings(arguments: argparse.Namespace, config: EngineConfig) -> list[ResolvedConfig]:
    block_sizes = arguments.block_sizes or [config.block_size or _BLOCK_SIZE]
    policies = arguments.policies or [config.scheduling_policy]
    sizes = arguments.pool_sizes or ([config.num_blocks] if config.num_blocks else [])
    if not (sizes or arguments.pool_tokens):
        raise ValueError("--simulate needs --pool-sizes (blocks) or --pool-tokens")
    made = []
    for policy, block_size in itertools.product(policies, block_sizes):
        # Checks the values as the engine does.
        EngineConfig.from_options({"scheduling_policy": policy, "block_size": block_size})
        pools = sizes or [_num_blocks(tokens, block_size) for tokens in arguments.pool_tokens]
        made += [
            ResolvedConfig(
                max_model_len=config.max_model_len or _MAX_MODEL_LEN,
                block_size=block_size,
                num_blocks=num_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens or _MAX_NUM_BATCHED_TOKENS,
                scheduling_policy=policy,
                enable_prefix_caching=config.enable_prefix_caching,
                decode_steps=config.decode_steps,
            )
            for num_blocks in pools
        ]
    return made


def _num_blocks(pool_tokens: int, block_size: int) -> int:
    if pool_tokens < block_size:
        raise ValueError(
            f"--pool-tokens ({pool_tokens}) must be at least the block size ({block_size})"
        )
    return pool_tokens // block_size
