"""Reading Hugging Face's `config.json`: typed keys, and messages that name them."""

from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.models.spec import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Config:
    """A model's config; every getter raises ValueError that names the key and the rule."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; `default` where the key is missing or null, required without one."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"config {key} ({value!r}) must be an integer")
        return value

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f"config {key} ({value!r}) must be a number")
        return float(value)

    def optional(self, key: str) -> float | None:
        """A number, or None where the key is missing, null or 0, which mean "off"."""
        return self.number(key, 0.0) or None

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"config {key} ({value!r}) must be true or false")
        return value

    def items(self, key: str, length: int) -> list[Any] | None:
        """A list of one value per layer, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length:
            raise ValueError(
                f"config {key} must be a list with a value for each of {length} layers"
            )
        return value[:length]

    def activation(self, *keys: str, default: str = "silu") -> Activation:
        """The activation that the first key that is there names."""
        name = next((self.values[key] for key in keys if self.values.get(key)), default)
        if name not in _ACTIVATIONS:
            raise ValueError(
                f"{keys[0]} {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[name]

    def head_dim(self) -> int:
        """Given, or the hidden size shared out among the heads."""
        heads = self.integer("num_attention_heads")
        if heads < 1:
            raise ValueError(f"num_heads ({heads}) must be at least 1")
        return self.integer("head_dim", self.integer("hidden_size") // heads)

    def max_position(self) -> int:
        """Longest context."""
        return self.integer("max_position_embeddings", 2048)

    def windows(self, is_sliding: Sequence[bool] | bool) -> list[int | None]:
        """Window of each layer: `layer_types` says where it applies, else `is_sliding`."""
        count = self.integer("num_hidden_layers")
        window = self.values.get("sliding_window")
        types = self.items("layer_types", count)
        if types is not None:
            known = {"sliding_attention", "full_attention"}
            if unknown := [kind for kind in types if kind not in known]:
                raise ValueError(
                    f"layer_types {unknown[0]!r} is not supported; supported: "
                    f"{', '.join(sorted(known))}"
                )
            is_sliding = [kind == "sliding_attention" for kind in types]
        elif isinstance(is_sliding, bool):
            is_sliding = [is_sliding] * count
        if window is None or not any(is_sliding):
            return [None] * count
        window = self.integer("sliding_window")
        return [window if slides else None for slides in is_sliding]
