"""The import graph points left only; read from the ASTs, so nothing is imported to check it.

`LAYERS` and `LEFT_OF` are the project's layer table. A module that is new at the top level of
`paged_jax` must be added to `LAYERS` on purpose.
"""

import ast
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400

# Top-level module of paged_jax -> layer.
LAYERS = {
    "config": "config",
    "shapes": "config",
    "bitmask": "config",
    "sampling_params": "config",
    "beam_search_params": "config",
    "outputs": "config",
    "errors": "config",
    "ledger": "ledger",
    "plan": "ledger",
    "core": "core",
    "ops": "ops",
    "decode": "decode",
    "models": "models",
    "engine": "engine",
    "llm": "llm",
    "async_llm": "llm",
    "planner": "llm",
    "request_stream": "llm",
    "engine_thread": "llm",
    "progress": "llm",
    "server": "server",
    "cli": "cli",
}

# Layer -> layers it may import, beside itself and pallas_kernels.
LEFT_OF = {
    "config": set(),
    "ledger": {"config"},
    "core": {"config"},
    "ops": {"config", "core"},
    "decode": {"config", "core", "ops"},
    "models": {"config", "core", "ops", "decode"},
    "engine": {"config", "ledger", "core", "ops", "decode", "models"},
    "llm": {"config", "ledger", "core", "ops", "decode", "models", "engine"},
    "server": {"config", "ledger", "core", "ops", "decode", "models", "engine", "llm"},
    # `paged-jax serve` starts the server.
    "cli": {"config", "ledger", "core", "ops", "decode", "models", "engine", "llm", "server"},
}

LIBRARY = ("paged_jax", "pallas_kernels")
HARDWARE = ("pallas_kernels.tpu", "pallas_kernels.gpu")


@dataclass(frozen=True)
class Import:
    """One imported name; `from a import b` is `a.b`."""

    name: str
    line: int
    is_in_function: bool
    is_relative: bool = False
    is_string: bool = False


def imports(tree: ast.AST, is_in_function: bool = False) -> Iterator[Import]:
    """Every import in a module, those by a literal string given to `import_module` included."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, node.lineno, is_in_function)
            case ast.ImportFrom(module=module, names=names, level=level):
                for alias in names:
                    name = f"{module}.{alias.name}" if module else alias.name
                    yield Import(name, node.lineno, is_in_function, is_relative=level > 0)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name, node.lineno, is_in_function, is_string=True)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, is_in_function or is_function)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def source_violations(source: str) -> list[str]:
    """What no Python file of the project may hold, whatever its layer."""
    tree = ast.parse(source)
    names = [(imported.line, imported.name) for imported in imports(tree)]
    names += [(n.lineno, ast.unparse(n)) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    private = {line for line, name in names if is_within(name, "jax._src")}
    deferred = {line for line, name in names if name == "__future__.annotations"}
    return [f"{line}: jax._src is private to JAX" for line in sorted(private)] + [
        f"{line}: deferred annotations blind the shape checker" for line in sorted(deferred)
    ]


def layer_violations(source: str, module: str) -> list[str]:
    """Wrong arrows of one library module, given by its dotted name."""
    is_facade = module == "paged_jax"
    top = module.split(".")[1] if is_within(module, "paged_jax") and not is_facade else None
    if top is not None and top not in LAYERS:
        return [f"1: {module} is in no layer: add '{top}' to LAYERS in tests/test_layers.py"]

    found = []
    tree = ast.parse(source)
    if is_facade:
        # What only type checkers read loads nothing; tests/test_lazy_import.py checks that.
        tree.body = [node for node in tree.body if not is_typing_block(node)]
    for imported in imports(tree):
        name, where = imported.name, f"{imported.line}: {module} imports {imported.name}"
        if imported.is_relative:
            found.append(f"{where} relatively; write the absolute name")
        elif name.split(".")[0] in ("tests", "benchmarks"):
            found.append(f"{where}; the library stands without it")
        elif is_within(name, "models"):
            found.append(f"{where}; its name is paged_jax.models")
        elif is_facade and is_within(name, "paged_jax") and not imported.is_string:
            found.append(f"{where}; the facade names modules only as strings")
        elif not is_facade and is_within(name, "paged_jax"):
            found += [f"{where}; {reason}" for reason in wrong_arrow(name, top)]
        for hardware in HARDWARE:
            is_outside = not is_within(module, hardware)
            if is_within(name, hardware) and is_outside and not imported.is_in_function:
                found.append(f"{where}; import hardware modules inside the function using them")
    return found


def is_typing_block(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def wrong_arrow(target: str, importer: str | None) -> Iterator[str]:
    """Why top-level module `importer` (None: pallas_kernels) may not import `target`."""
    target_top = [*target.split("."), ""][1]
    if importer is None:
        yield "pallas_kernels stands alone"
    elif target_top.startswith("__") and target_top.endswith("__"):
        return  # `from paged_jax import __version__` names no layer.
    elif target_top not in LAYERS:
        yield (
            f"'{target_top}' is in no layer: import a name from the module that defines it, "
            "or add a new module to LAYERS in tests/test_layers.py"
        )
    else:
        layer, target_layer = LAYERS[importer], LAYERS[target_top]
        if target_layer != layer and target_layer not in LEFT_OF[layer]:
            yield f"{target_layer} is not left of {layer}"


def python_files(root: Path, *trees: str) -> Iterator[Path]:
    """Python files below root's trees; follows the link paged_jax/models."""
    for tree in trees:
        for folder, _, names in os.walk(root / tree, followlinks=True):
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_violations(root: Path) -> list[str]:
    """Wrong arrows of every library module below root, each with its file and line."""
    return [
        f"{path.relative_to(root)}:{violation}"
        for path in python_files(root, *LIBRARY)
        for violation in layer_violations(path.read_text(encoding="utf-8"), module_name(path, root))
    ]


def long_files(root: Path) -> list[str]:
    """Library and benchmark files past the limit on lines, with their length."""
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(root, *LIBRARY, "benchmarks")
    }
    return [
        f"{path.relative_to(root)}: {n} lines, at most {MAX_LINES}"
        for path, n in lengths.items()
        if n > MAX_LINES
    ]


def test_imports_point_left_only():
    assert tree_violations(ROOT) == []


RIVALS = "benchmarks/gpu_rivals.py"
"""JAX has no public way to cuDNN's paged attention, which ours is measured against."""


def test_private_jax_and_deferred_annotations_are_not_used():
    found = [
        f"{path.relative_to(ROOT)}:{violation}"
        for path in python_files(ROOT, *LIBRARY, "tests", "benchmarks")
        for violation in source_violations(path.read_text(encoding="utf-8"))
    ]
    [rival] = [violation for violation in found if violation.startswith(f"{RIVALS}:")]
    assert "jax._src is private" in rival
    assert [violation for violation in found if violation != rival] == []


def test_notebooks_do_not_use_private_jax():
    for path in (ROOT / "benchmarks").rglob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        assert "jax._src" not in code, path.relative_to(ROOT)


def test_library_files_are_short_enough_to_read():
    assert long_files(ROOT) == []


def test_walk_reaches_every_package():
    modules = {module_name(path, ROOT) for path in python_files(ROOT, *LIBRARY)}
    assert {"paged_jax", "paged_jax.models", "paged_jax.core", "pallas_kernels"} <= modules


def test_layer_table_has_no_cycle():
    for layer, left in LEFT_OF.items():
        for other in left:
            assert layer not in LEFT_OF[other]
            assert LEFT_OF[other] <= left
    assert set(LAYERS.values()) == set(LEFT_OF)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an archive may hold a copy of models")
def test_models_is_a_relative_symlink():
    # A top-level package called `models` would clash with a user's own, and a package-dir mapping
    # fails inside a clone, whose own paged_jax shadows the installed one.
    link = ROOT / "paged_jax" / "models"
    assert link.is_symlink()
    assert os.readlink(link) == "../models"


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("pallas_kernels.reference", "import paged_jax.shapes", "stands alone"),
        ("pallas_kernels.reference", "from paged_jax import shapes", "stands alone"),
        ("pallas_kernels.reference", "import paged_jax", "stands alone"),
        (
            "paged_jax.config",
            "from paged_jax.core.rows import free",
            "core is not left of config",
        ),
        ("paged_jax.errors", "import paged_jax.ledger", "ledger is not left of config"),
        ("paged_jax.core.rows", "import paged_jax.ops.decode", "ops is not left of core"),
        ("paged_jax.core.rows", "from paged_jax import ledger", "ledger is not left of core"),
        ("paged_jax.ops.sample", "from paged_jax.plan import Plan", "ledger is not left of ops"),
        ("paged_jax.decode", "import paged_jax.ledger as book", "ledger is not left of decode"),
        ("paged_jax.models.rope", "import paged_jax.ledger", "ledger is not left of models"),
        ("paged_jax.ledger", "from paged_jax.core import audit", "core is not left of ledger"),
        ("paged_jax.models.rope", "import paged_jax.engine", "engine is not left of models"),
        ("paged_jax.engine.runner", "import paged_jax.llm", "llm is not left of engine"),
        ("paged_jax.llm", "def f():\n    import paged_jax.cli", "cli is not left of llm"),
        ("paged_jax.llm", "import paged_jax.server.app", "server is not left of llm"),
        ("paged_jax.server.app", "import paged_jax.cli", "cli is not left of server"),
        ("paged_jax.core.rows", "import_module('paged_jax.llm')", "llm is not left of core"),
        ("paged_jax.core", "importlib.import_module('paged_jax.llm')", "llm is not left of core"),
        ("paged_jax.engine.runner", "from paged_jax import LLM", "the module that defines it"),
        ("paged_jax.engine.runner", "import paged_jax", "the module that defines it"),
        ("paged_jax", "from paged_jax.llm import LLM", "only as strings"),
        ("paged_jax.core.rows", "from .state import BlockState", "absolute"),
        ("paged_jax.core", "from . import blocks", "absolute"),
        ("paged_jax.models.rope", "import models.norm", "paged_jax.models"),
        ("paged_jax.core.rows", "from tests.kernels import cases", "without it"),
        ("paged_jax.ops.decode", "from pallas_kernels import tpu", "inside the function"),
        ("paged_jax.ops.decode", "import pallas_kernels.gpu.decode", "inside the function"),
        ("pallas_kernels", "from pallas_kernels.tpu.decode import f", "inside the function"),
        ("pallas_kernels.gpu.decode", "import pallas_kernels.tpu.decode", "inside the function"),
        ("paged_jax.utils", "", "add 'utils' to LAYERS"),
        ("paged_jax.managers.blocks", "", "add 'managers' to LAYERS"),
    ],
)
def test_planted_wrong_arrow_is_caught(module, source, reason):
    (violation,) = layer_violations(source, module)
    assert reason in violation


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paged_jax", "import_module('paged_jax.llm')"),
        ("paged_jax.ledger", "from paged_jax.plan import Plan\nimport paged_jax.config"),
        ("paged_jax.ops.decode", "def f():\n    from pallas_kernels.tpu.decode import g"),
        ("paged_jax.ops.decode", "from pallas_kernels import reference"),
        ("pallas_kernels.tpu.decode", "from pallas_kernels.tpu.tiles import Tiles"),
        ("paged_jax.engine.runner", "from paged_jax.ledger import Ledger"),
        ("paged_jax.server.app", "from paged_jax.llm import LLM"),
        ("paged_jax.cli.serve", "from paged_jax.server.app import serve"),
        ("paged_jax.cli", "from paged_jax import __version__"),
    ],
)
def test_right_arrow_is_not_reported(module, source):
    assert layer_violations(source, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax import _src",
        "import jax\ny = jax._src.core.Trace",
        "from __future__ import annotations",
    ],
)
def test_planted_private_or_deferred_import_is_caught(source):
    assert len(source_violations(source)) == 1


def test_planted_files_are_found_through_the_symlink(tmp_path):
    (tmp_path / "paged_jax").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "pallas_kernels").mkdir()
    (tmp_path / "paged_jax" / "models").symlink_to("../models")
    (tmp_path / "models" / "rope.py").write_text("import math\nimport paged_jax.engine.runner\n")
    (tmp_path / "pallas_kernels" / "long.py").write_text("x = 1\n" * (MAX_LINES + 1))

    (violation,) = tree_violations(tmp_path)
    assert violation.startswith("paged_jax/models/rope.py:2: ")
    assert long_files(tmp_path) == ["pallas_kernels/long.py: 401 lines, at most 400"]
