"""The only file that knows how JAX versions differ, from 0.10.2 to 0.12."""

import contextlib
import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

TRITON_CUSTOM_CALL: str = getattr(plt, "CUSTOM_CALL_TARGET_NAME", "__gpu$xla.gpu.triton")
"""Target of a Triton kernel's custom call; the constant exists from 0.11 on."""


def reciprocal(x: jax.Array, *, approx: bool = False) -> jax.Array:
    """1 / x inside a TPU kernel; moved from `pl` to `pltpu` in 0.11.2, where `pl`'s warns."""
    home: Any = pltpu if hasattr(pltpu, "reciprocal") else pl
    return home.reciprocal(x, approx=approx)


def tpu_interpret_params() -> Any:
    """TPU interpret mode that makes wrong reads visible.

    Races are looked for, memory that was not written holds NaN, and reads out of bounds raise.
    From 0.12 on a race raises; before, it is left in the interpreter's record of races.
    """
    known = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    strict: dict[str, Any] = {"on_race": "raise"} if "on_race" in known else {}
    return pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", **strict
    )


def tpu_compiler_params(
    semantics: tuple[Any, ...], vmem_limit_bytes: int | None, *, is_checked: bool = False
) -> Any:
    """Compiler parameters of a TPU kernel; bounds and semaphores are checked on request only."""
    return pltpu.CompilerParams(
        dimension_semantics=semantics,
        vmem_limit_bytes=vmem_limit_bytes,
        disable_bounds_checks=not is_checked,
        disable_semaphore_checks=not is_checked,
    )


def has_mosaic_gpu() -> bool:
    """Whether Mosaic GPU has what our kernels need: from 0.12 on.

    `mma` and interpret mode came with 0.11.1; 0.11.2 has no `store` yet, which writes registers of
    any layout.
    """
    try:
        plgpu = mosaic_gpu()
    except ImportError:  # 0.10.2 without absl-py
        return False
    return all(hasattr(plgpu, name) for name in ("mma", "store", "InterpretGPUParams"))


def mosaic_interpret_params() -> Any:
    """Mosaic GPU's interpret mode that makes wrong reads visible.

    Races and reads out of bounds raise, memory that was not written holds NaN.
    """
    return mosaic_gpu().InterpretGPUParams(detect_races=True)


def mosaic_interpret(params: Any) -> Any:
    """Context in which kernels of Mosaic GPU are interpreted, unless `params` is false."""
    if not params:
        return contextlib.nullcontext()
    plgpu = mosaic_gpu()
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams() if params is True else params)


def mosaic_gpu() -> Any:
    """Mosaic GPU's module, untyped: what it holds depends on the version."""
    # Takes a second to import, and most programs do without.
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu
