"""The engine's step of a divided Llama 3 as a program to compile for a mesh of absent TPUs."""

import functools
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged_jax import core
from paged_jax.decode import create_row_state
from paged_jax.engine import logit_options
from paged_jax.engine.places import Places
from paged_jax.engine.step import Sizes, make_step
from paged_jax.models.decoder import Decoder
from paged_jax.models.parallel import Share, cuts
from paged_jax.models.shard import Placer
from paged_jax.models.spec import DecoderSpec, RopeSpec, uniform_spec
from tests.aot.step import CONTEXT_LEN, NUM_ROWS, inputs
from tests.aot.targets import device_of
from tests.hlo import pool_faults

LLAMA_3 = {"vocab_size": 128256, "num_kv_heads": 8, "head_dim": 128, "norm_eps": 1e-5}
MODELS = {
    "8B": {"hidden_size": 4096, "num_heads": 32, "mlp_size": 14336},
    "70B": {"hidden_size": 8192, "num_heads": 64, "mlp_size": 28672},
}


@dataclass(frozen=True, kw_only=True)
class Divided:
    """What the compiler made of a step, on one device."""

    spec: DecoderSpec
    share: Share
    argument_bytes: int
    temp_bytes: int
    alias_bytes: int
    pool_bytes: int
    option_bytes: int
    faults: tuple[str, ...]
    collectives: Counter[str]
    kernels: Counter[str]
    sums: tuple[tuple[str, tuple[int, ...]], ...]
    """Dtypes and shapes of what is summed over the ranks."""


def spec_of(name: str, num_layers: int) -> DecoderSpec:
    return uniform_spec(
        num_layers=num_layers,
        rope=RopeSpec(theta=500000.0),
        max_position_embeddings=CONTEXT_LEN,
        **LLAMA_3,
        **MODELS[name],
    )


@functools.cache
def compile_divided(
    name: str, topology: str, num_ranks: int, num_tokens: int, num_layers: int, pool_tokens: int
) -> Divided:
    """Compiles the step of T tokens and R rows for the first devices of a topology."""
    device_of("v6e")  # sets what the compiler's library reads
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:num_ranks]), ("tp",))
    spec, share = spec_of(name, num_layers), Share(axis="tp", num_ranks=num_ranks)
    model = nnx.eval_shape(lambda: Decoder(spec, share=share, dtype="bfloat16", rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    divided = cuts(spec, share)
    whole = PartitionSpec()

    def placed(leaf: Any, where: PartitionSpec) -> jax.ShapeDtypeStruct:
        """A leaf of one rank, of all of them."""
        pairs = itertools.zip_longest(leaf.shape, where)
        shape = [size * (num_ranks if axis else 1) for size, axis in pairs]
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, where))

    params = []
    for path, leaf in zip(paths, leaves, strict=True):
        cut = divided.get(path)
        params.append(placed(leaf, whole if cut is None else cut.partition("tp")))
    block_size = 128
    num_blocks = pool_tokens // block_size
    kv = jax.eval_shape(
        lambda: core.create_kv_cache(
            model.cache_spec(), num_blocks, block_size, jnp.bfloat16, platform="tpu"
        )
    )
    places = Places(placer=Placer(spec, mesh))
    on_mesh = places.on_mesh(tuple(params), kv)
    own_pool = kv.kv
    kv = jax.tree.map(placed, kv, places.divided(kv))
    small = (
        lambda: core.create_block_state(
            num_blocks, block_size, NUM_ROWS, CONTEXT_LEN // block_size
        ),
        lambda: create_row_state(NUM_ROWS),
        lambda: logit_options.create(NUM_ROWS, CONTEXT_LEN, spec.vocab_size),
    )
    blocks, rows, options = (
        jax.tree.map(lambda leaf: placed(leaf, whole), jax.eval_shape(make)) for make in small
    )
    given = jax.tree.map(lambda leaf: placed(leaf, whole), inputs(num_tokens))
    sizes = Sizes(decode_steps=8, num_listed=20, axis_name="tp")
    step = make_step(graphdef, treedef, sizes, on_mesh)
    args = (tuple(params), kv, blocks, rows, given, options)
    compiled = step.trace(*args).lower(lowering_platforms=("tpu",)).compile()
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    calls = [line for line in hlo.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return Divided(
        spec=spec,
        share=share,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        pool_bytes=own_pool.size * own_pool.dtype.itemsize,
        option_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(options)),
        faults=tuple(pool_faults(hlo, own_pool.shape)),
        collectives=Counter(
            re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", hlo)
        ),
        sums=tuple(
            (dtype, tuple(int(n) for n in shape.split(",") if n))
            for dtype, shape in re.findall(
                r"= \(?(\w+)\[([\d,]*)\][^=]* all-reduce(?:-start)?\(", hlo
            )
        ),
        kernels=Counter(re.findall(r"/(\w+)/pallas_call", "\n".join(calls))),
    )
