"""Strictness for every test, and the models they share."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jaxtyping import install_import_hook

# Before the packages are imported: shapes and dtypes of annotations are then checked at run time.
install_import_hook(["paged_jax.ops", "pallas_kernels"], "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Meshes for the tests of sharding.
jax.config.update("jax_num_cpu_devices", 8)
# Halves compile time, which is most of the time of these tests. The README's commands, which
# .ci/run executes, run the optimised code.
jax.config.update("jax_disable_most_optimizations", True)

DATA = Path(__file__).parent / "data"


MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """A program that XLA compiles for CPU is several mappings of memory, of which Linux gives a
    process 65530; whoever asks for more crashes. So programs are forgotten when there are many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model, fetched into the user's cache at its first use."""
    from paged_jax.models.hub import resolve_model

    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def toy():
    """See `make_toy`."""
    return make_toy()


def make_toy(seed: int = 7):
    """A random Llama-like model small enough to compile in seconds: V 258, 2 layers, float32."""
    from flax import nnx

    from paged_jax.models.decoder import Decoder
    from paged_jax.models.spec import uniform_spec

    spec = uniform_spec(
        vocab_size=258,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_size=48,
        norm_eps=1e-6,
        max_position_embeddings=512,
    )
    return Decoder(spec, rngs=nnx.Rngs(seed))


@pytest.fixture
def rng() -> np.random.Generator:
    """Seeded anew for each test."""
    return np.random.default_rng(0)
