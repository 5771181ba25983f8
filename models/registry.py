"""Architectures by Hugging Face's class name, resolved when they are used."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paged_jax.models.spec import DecoderSpec

# Module of each architecture. Resolved at call time: importing a model file first would otherwise
# be circular.
_MODULES = {
    "LlamaForCausalLM": "paged_jax.models.llama",
    "MistralForCausalLM": "paged_jax.models.llama",
}


class Architecture(NamedTuple):
    """What an architecture file provides."""

    decoder_spec: Callable[[Mapping[str, Any]], DecoderSpec]
    weight_names: Callable[[DecoderSpec], dict[str, tuple[str, ...]]]
    is_ignored: Callable[[str, DecoderSpec], bool]


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec that a config describes; ValueError for one that is malformed."""
    found = architecture(config)
    try:
        return found.decoder_spec(config)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"the model's config is malformed: {error}") from error


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Finds the architecture that a config names.

    Raises: ValueError that lists what is supported.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ValueError(f"config architectures ({names!r}) must be a list")
    for name in names:
        if name in _MODULES:
            module = importlib.import_module(_MODULES[name])
            return Architecture(module.decoder_spec, module.weight_names, module.is_ignored)
    raise ValueError(
        f"architecture {', '.join(map(str, names)) or '(none named)'} is not supported; "
        f"supported: {', '.join(sorted(_MODULES))}"
    )
