"""Rotary frequencies: from a checkpoint's config to an angle per position and pair."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import ops
from paged_jax.models.spec import RopeSpec

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OLD_NAMES = {"su": "longrope", "mrope": "default"}

Rotation = tuple[jax.Array, jax.Array]
"""Cosines and sines [T, D / 2] of `ops.rope_tables`."""


def rope_spec(
    config: Mapping[str, Any], *, layer_type: str | None = None, is_interleaved: bool = False
) -> RopeSpec:
    """Reads `rope_parameters`, or the older `rope_scaling` and `rope_theta`.

    Args:
      config: Hugging Face's `config.json`.
      layer_type: Whose parameters are read where they differ by type of layer.
      is_interleaved: See `RopeSpec`.
    Raises: ValueError for an unknown rope type or a missing parameter; the message lists what is
      supported or names the key.
    """
    found: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    found |= _object(config, "rope_scaling") | _object(config, "rope_parameters")
    if layer_type in found:
        found = _object(found, layer_type)
    kind = found.get("rope_type") or found.get("type") or "default"
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    max_position = int(config.get("max_position_embeddings") or 2048)
    original = (
        config.get("original_max_position_embeddings")
        or found.get("original_max_position_embeddings")
        or max_position
    )
    if kind == "dynamic":
        original = max_position  # it grows from there, whatever else a config says
    factor = found.get("factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise ValueError(f"rope type {kind!r} needs rope_parameters.factor")
        factor = max_position / original if kind in ("yarn", "longrope") else 1.0
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            if not found.get(key):
                raise ValueError(f"rope type 'longrope' needs rope_parameters.{key}")
    fraction = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return RopeSpec(
        theta=float(found.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(factor),
        fraction=1.0 if fraction is None else float(fraction),
        original_max_position=int(original),
        low_freq_factor=float(found.get("low_freq_factor", 1.0)),
        high_freq_factor=float(found.get("high_freq_factor", 4.0)),
        beta_fast=float(found.get("beta_fast") or 32.0),
        beta_slow=float(found.get("beta_slow") or 1.0),
        is_truncated=bool(found.get("truncate", True)),
        attention_factor=_attention_factor(kind, float(factor), int(original), found),
        freq_divisors=_divisors(found, "short_factor") or _divisors(config, "rope_freq_factors"),
        long_divisors=_divisors(found, "long_factor"),
        is_interleaved=is_interleaved,
    )


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """How much sharper attention becomes when a context is stretched (Peng et al. 2023, 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def rotation(spec: RopeSpec, head_dim: int, positions: jax.Array, context_length: int) -> Rotation:
    """Cosines and sines for `ops.rope`, once per step and kind of layer.

    Args:
      spec: Of the layer.
      head_dim: D; only its part `spec.fraction` is rotated.
      positions: i32[T].
      context_length: Longest sequence; beyond `original_max_position` LongRoPE's frequencies for
        long contexts are taken, for all tokens, since keys that are cached cannot change.
    """
    frequencies = jnp.asarray(inverse_frequencies(spec, head_dim, context_length))
    if spec.kind == "dynamic":
        cos, sin = ops.rope_tables(positions, _dynamic(spec, frequencies, positions))
    else:
        cos, sin = ops.rope_tables(positions, frequencies)
    return cos * spec.attention_factor, sin * spec.attention_factor


def rotate(x: jax.Array, tables: Rotation, spec: RopeSpec) -> jax.Array:
    """Rotates heads [..., T, H, D]; what lies past the rotated part of a head passes."""
    width = 2 * tables[0].shape[-1]
    turned, passed = x[..., :width], x[..., width:]
    if spec.is_interleaved:
        pairs = turned.reshape(*turned.shape[:-1], -1, 2)
        turned = jnp.swapaxes(pairs, -1, -2).reshape(turned.shape)
    turned = ops.rope(turned, *tables)
    return turned if not passed.shape[-1] else jnp.concatenate([turned, passed], axis=-1)


def inverse_frequencies(spec: RopeSpec, head_dim: int, context_length: int = 0) -> np.ndarray:
    """float32 [rotated / 2], the angle per position of each pair of features.

    Rounded to float32 where models are trained with that: one unit in the last place is an angle
    of 1e-3 after some ten thousand positions.

    Source: Su et al. 2021 for the base form; the `llama3` bands as described for Llama 3.1; Peng
    et al. 2023 (YaRN); Ding et al. 2024 (LongRoPE).
    """
    dim = int(spec.fraction * head_dim)
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    periods = (spec.theta ** exponents.astype(np.float64)).astype(np.float32)
    is_long = context_length > spec.original_max_position
    if divisors := (spec.long_divisors if is_long else ()) or spec.freq_divisors:
        periods = np.asarray(divisors, np.float32) * periods
    if spec.kind == "linear":
        return 1.0 / periods / np.float32(spec.factor)
    if spec.kind == "llama3":
        return _llama3(1.0 / periods, spec)
    if spec.kind == "yarn":
        return _yarn(periods, spec, dim)
    return 1.0 / periods


def _llama3(inv_freq: np.ndarray, spec: RopeSpec) -> np.ndarray:
    """Long waves are stretched by `factor`, short ones kept, those between are blended."""
    wavelength = 2 * math.pi / inv_freq
    turns = spec.original_max_position / wavelength
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * inv_freq / spec.factor + blend * inv_freq


def _yarn(periods: np.ndarray, spec: RopeSpec, dim: int) -> np.ndarray:
    """Features that turn often within the original context are kept, slow ones are stretched."""

    def feature(turns: float) -> float:
        """Where, along the features, a wave turns this often."""
        wavelength = spec.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low, high = feature(spec.beta_fast), feature(spec.beta_slow)
    if spec.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    kept = 1 - np.clip(ramp, 0.0, 1.0)
    return 1.0 / (spec.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _dynamic(spec: RopeSpec, inv_freq: jax.Array, positions: jax.Array) -> jax.Array:
    """[T, D / 2]: past the original context the base grows with the position.

    Each token takes the base of a sequence that ends with it, which is what decoding token by
    token gives, so a result depends neither on the batch nor on how a prompt is cut.
    """
    half = inv_freq.shape[0]
    length = jnp.maximum(positions + 1, spec.original_max_position).astype(jnp.float32)
    grown = spec.factor * length / spec.original_max_position - (spec.factor - 1.0)
    # The base to the power of -2i / D, and its growth to D / (D - 2) times that.
    exponent = np.arange(half, dtype=np.float32) / max(half - 1, 1)
    return inv_freq[None, :] * grown[:, None] ** -jnp.asarray(exponent)[None, :]


def _attention_factor(kind: str, factor: float, original: int, found: Mapping[str, Any]) -> float:
    given = found.get("attention_factor")
    if given is not None:
        return float(given)
    if kind == "yarn":
        scale, scale_all = found.get("mscale"), found.get("mscale_all_dim")
        if scale and scale_all:
            return yarn_scale(factor, float(scale)) / yarn_scale(factor, float(scale_all))
        return yarn_scale(factor)
    if kind == "longrope" and factor > 1.0:
        return math.sqrt(1.0 + math.log(factor) / math.log(original))
    return 1.0


def _divisors(found: Mapping[str, Any], key: str) -> tuple[float, ...]:
    return tuple(float(value) for value in found.get(key) or ())


def _object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config {key} ({value!r}) must be an object")
    return dict(value)
