"""Parameters as training code knows them, and back.

A `Decoder` keeps the rows of q, k and v in one matrix `qkv`, and those of gate and up in one
matrix `gate_up`; optimizers per layer, LoRA and other software want them apart:

    graphdef, state = nnx.split(model)
    params = jax.jit(unpack)(state)  # {"blocks": {0: {"attention": {"q": {"weight": ...

    def loss(params, tokens):
        logits = nnx.merge(graphdef, pack(params))(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    grads = jax.jit(jax.grad(loss))(params, tokens)  # in the tree of `params`
    engine.update_weights(jax.jit(pack)(params))  # serve what was trained
"""

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

from flax import nnx

Tree = dict[Any, Any]
"""Arrays in nested dicts, of JAX or of numpy."""


def unpack(params: Mapping[Any, Any] | nnx.State) -> Tree:
    """Splits `qkv` into q, k, v and `gate_up` into gate, up; matrices stay as they are, [out, in],
    and [X, in, out] those of experts.

    Where there is no gate, `gate_up` becomes `up`. Pure, and works under `jit`; an array that is
    sharded over a mesh gives arrays that are sharded in the same way.

    Args:
      params: `nnx.state(model)`, or what `nnx.to_pure_dict` makes of it.
    """
    pure = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return _walk(pure, _unpacked)


def pack(params: Mapping[Any, Any]) -> Tree:
    """The inverse of `unpack`; `nnx.merge` and `nnx.update` take what it gives."""
    return _walk(params, _packed)


def _walk(tree: Mapping[Any, Any], change: Callable[[Tree], Tree]) -> Tree:
    """A copy of a tree, every mapping in it changed before what is below it."""
    changed = change(dict(tree))
    return {
        key: _walk(value, change) if isinstance(value, Mapping) else value
        for key, value in changed.items()
    }


def _unpacked(node: Tree) -> Tree:
    # A key keeps its place, so that the order of the leaves is that of the computation.
    found: Tree = {}
    for key, value in node.items():
        if key == "qkv" and "out" in node:
            queries = node["out"]["weight"].shape[-1]
            rest = (value["weight"].shape[0] - queries) // 2
            found |= _split(value, {"q": queries, "k": rest, "v": rest})
        elif key == "gate_up" and "down" in node:
            down = node["down"]["weight"]
            inner = down.shape[1]  # [out, in], or [X, in, out]
            rows = value["weight"].shape[_rows_axis("weight", value["weight"])]
            is_gated = rows == 2 * inner
            found |= _split(value, {"gate": inner, "up": inner} if is_gated else {"up": inner})
        else:
            found[key] = value
    return found


def _packed(node: Tree) -> Tree:
    if node.keys() >= {"q", "k", "v"}:
        node = _joined(node, ("q", "k", "v"), "qkv")
    # The bottleneck of latent attention has `down` and `up` too, around a norm.
    if node.keys() >= {"up", "down"} and "norm" not in node:
        node = _joined(node, ("gate", "up") if "gate" in node else ("up",), "gate_up")
    return node


def _split(layer: Mapping[str, Any], rows: dict[str, int]) -> Tree:
    """A layer's rows, shared out; experts have an axis before them."""
    parts = {name: {} for name in rows}
    ranges = list(pairwise(accumulate(rows.values(), initial=0)))
    for key, array in layer.items():
        axis = _rows_axis(key, array)
        for name, (start, end) in zip(rows, ranges, strict=True):
            index = (slice(None),) * axis + (slice(start, end),)
            parts[name][key] = array[index]
    return parts


def _joined(node: Tree, names: tuple[str, ...], whole: str) -> Tree:
    layers = [node[name] for name in names]
    joined = {}
    for key, array in layers[0].items():
        concat = array.__array_namespace__().concat
        joined[key] = concat([layer[key] for layer in layers], axis=_rows_axis(key, array))
    found: Tree = {}
    for key, value in node.items():
        if key == names[0]:
            found[whole] = joined
        elif key not in names:
            found[key] = value
    return found


def _rows_axis(key: str, array: Any) -> int:
    """The axis of what comes out: [out], [out, in], and of experts [X, out], [X, in, out]."""
    if key == "bias":
        return array.ndim - 1
    return 0 if array.ndim == 2 else 2
