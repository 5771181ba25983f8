"""Rotary frequencies: from a checkpoint's config to one angle per position and pair."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_jax.models.spec import RopeSpec

KINDS = ("default", "linear", "llama3")


def rope_spec(config: Mapping[str, Any]) -> RopeSpec:
    """Reads `rope_parameters`, or the older `rope_scaling` and `rope_theta`.

    Raises: ValueError for an unknown rope type; the message lists what is supported.
    """
    found = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    theta = found.get("rope_theta") or config.get("rope_theta") or 10000.0
    return RopeSpec(
        theta=float(theta),
        kind=kind,
        factor=float(found.get("factor", 1.0)),
        low_freq_factor=float(found.get("low_freq_factor", 1.0)),
        high_freq_factor=float(found.get("high_freq_factor", 4.0)),
        original_max_position=int(found.get("original_max_position_embeddings", 8192)),
        freq_divisors=tuple(config.get("rope_freq_factors") or ()),
    )


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> np.ndarray:
    """float32 [D / 2], the angle per position of each pair of features.

    Source: Su et al. 2021 for the base form; the `llama3` bands as described for Llama 3.1.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inv_freq = 1.0 / spec.theta**exponent
    if spec.kind == "linear":
        inv_freq = inv_freq / spec.factor
    if spec.kind == "llama3":
        inv_freq = _llama3(inv_freq, spec)
    if spec.freq_divisors:
        inv_freq = inv_freq / np.asarray(spec.freq_divisors)
    return inv_freq.astype(np.float32)


def _llama3(inv_freq: np.ndarray, spec: RopeSpec) -> np.ndarray:
    """Long waves are stretched by `factor`, short ones kept, those between are blended."""
    wavelength = 2 * math.pi / inv_freq
    turns = spec.original_max_position / wavelength
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * inv_freq / spec.factor + blend * inv_freq
