"""Importing the package or asking for help costs no accelerator stack and changes no setting.

Each test starts a fresh interpreter: in this one, other tests have loaded everything.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

JAX = {"jax", "jaxlib", "flax", "pallas_kernels"}
HEAVY = JAX | {"optax", "orbax", "tokenizers", "safetensors", "jinja2", "gguf"}
SERVER = {"fastapi", "starlette", "uvicorn"}


JAX_VARIABLES = ("JAX_", "XLA_", "TF_CPP_")


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    # This process has imported the package: what that may have set must not be inherited.
    env = {key: value for key, value in os.environ.items() if not key.startswith(JAX_VARIABLES)}
    command = [sys.executable, *args]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def evaluate(setup: str, expression: str):
    """Value of a JSON-able expression after `setup`, in a fresh interpreter."""
    done = run_python("-c", f"{setup}\nimport json\nprint(json.dumps({expression}))")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def top_level(modules: list[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


LOADED = "sorted(__import__('sys').modules)"


def test_import_loads_no_accelerator_tokenizer_or_server_module():
    loaded = evaluate("import paged_jax; paged_jax.__all__; dir(paged_jax)", LOADED)
    assert "paged_jax" in loaded
    assert top_level(loaded) & (HEAVY | SERVER) == set()


def test_probe_sees_a_heavy_module_that_is_loaded():
    assert "jax" in top_level(evaluate("import jax", LOADED))


def test_dir_lists_every_public_name_before_its_first_use():
    public, listed = evaluate("import paged_jax", "[paged_jax.__all__, dir(paged_jax)]")
    assert {"LLM", "SamplingParams"} <= set(public)
    assert set(public) <= set(listed)


def test_every_public_name_resolves():
    public, resolved = evaluate(
        "import paged_jax",
        "[paged_jax.__all__, [n for n in paged_jax.__all__ if getattr(paged_jax, n) is not None]]",
    )
    assert resolved == public


def test_sampling_params_resolve_without_jax():
    loaded = evaluate("from paged_jax import SamplingParams; SamplingParams()", LOADED)
    assert top_level(loaded) & HEAVY == set()


def test_unknown_attribute_raises_with_the_name_of_the_module():
    done = run_python("-c", "import paged_jax; paged_jax.__all__; paged_jax.LMM")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("AttributeError: ")
    assert "paged_jax" in last
    assert "LMM" in last


@pytest.mark.parametrize(
    "use",
    ["import paged_jax", "import paged_jax; [getattr(paged_jax, n) for n in paged_jax.__all__]"],
    ids=["import", "every public name"],
)
def test_import_leaves_jax_configuration_alone(use):
    setup = f"""
import os
import jax
import flax.nnx

def settings():
    values = {{f"config.{{key}}": repr(value) for key, value in jax.config.values.items()}}
    names = [key for key in os.environ if key.startswith({JAX_VARIABLES})]
    return values | {{key: os.environ[key] for key in names}}

before = settings()
{use}
after = settings()
import paged_jax
paged_jax.__all__
"""
    # Options that another JAX module registers when it is imported are not changes.
    is_ours = "key in before or not key.startswith('config.')"
    changed = f"{{key: [before.get(key), after[key]] for key in after if {is_ours}}}"
    pairs = evaluate(setup, changed)
    assert len(pairs) > 50
    assert {key: pair for key, pair in pairs.items() if pair[0] != pair[1]} == {}


def imported_by(*args: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """A finished run of the interpreter and the modules that it imported."""
    done = run_python("-X", "importtime", *args)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done, {line.rsplit("|", 1)[1].strip() for line in lines}


@pytest.mark.parametrize(
    "args",
    [
        ["-m", "paged_jax.cli", "--help"],
        ["-c", "from paged_jax.cli import main; main(['--help'])"],
    ],
    ids=["module", "console script"],
)
def test_help_does_not_import_jax(args):
    done, loaded = imported_by(*args)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage" in done.stdout.lower()
    assert "generate" in done.stdout
    assert "paged_jax" in loaded
    assert top_level(list(loaded)) & (HEAVY | SERVER) == set()
