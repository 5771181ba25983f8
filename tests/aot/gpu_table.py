"""Compiles the whole product of factors for GPUs and writes it as a page: docs/gpu_compiles.md.

    python -m tests.aot.gpu_table        # hours on two cores; goes on where it was stopped

Results are kept in build/gpu_compiles.jsonl under a fingerprint of kernels and compiler: after a
change of either, all is compiled again. To be run with the newest JAX, which has all kernels.
"""

import hashlib
import importlib.metadata
import json
import queue
import sys
import threading
from collections.abc import Iterable, Iterator

from tests.aot import shapes
from tests.aot.gpu_compile import BOUNDS, ROOT, Result, compile_all, faults
from tests.aot.gpu_shapes import FACTORS, is_offered, op_of, refusal, served_entries
from tests.aot.shapes import Entry

CACHE = ROOT / "build" / "gpu_compiles.jsonl"
PAGE = ROOT / "docs" / "gpu_compiles.md"
NUM_PROCESSES = 2
TARGETS = tuple(target for target in FACTORS["target"] if target != "h200")
"""H200 runs what is compiled for H100."""
POOLS = tuple(pool for pool in FACTORS["pool"] if pool not in ("float16", "float8_e5m2"))
"""Of a width and a kind one: its twin differs in casts. The tests compile all of them."""
MODELS = {name: shape for name, shape in shapes.SHAPES.items() if "/tp" not in name}
"""One device's share has fewer KV heads, which are the grid's, and the kernel of the whole."""
KERNELS = tuple(k for k in FACTORS["kernel"] if op_of(k) in ("decode", "prefill"))
SOURCES = (
    "pallas_kernels/compat.py",
    "pallas_kernels/options.py",
    "pallas_kernels/refs.py",
    "pallas_kernels/gpu/**/*",
    "paged_jax/core/kv.py",
    "tests/aot/gpu_programs.py",
    "tests/aot/gpu_shapes.py",
    "tests/aot/shapes.py",
)
PACKAGES = ("jax", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


def main() -> None:
    """Compiles what the cache lacks, then writes the page; exit status 1 if anything failed."""
    cells, key = {}, fingerprint()
    if CACHE.exists():
        lines = map(json.loads, CACHE.read_text(encoding="utf-8").splitlines())
        cells = {Entry(*x["entry"]): x["cell"] for x in lines if x["key"] == key}
    missing = [entry for entry in product() if entry not in cells]
    CACHE.parent.mkdir(exist_ok=True)
    with CACHE.open("a", encoding="utf-8") as cache:
        for done, (entry, result) in enumerate(compile_missing(missing), 1):
            cells[entry] = cell = cell_of(entry, result)
            cache.write(json.dumps({"key": key, "entry": entry, "cell": cell}) + "\n")
            cache.flush()
            print(f"{done}/{len(missing)} {entry}: {cell}", file=sys.stderr)
    PAGE.write_text(page(cells), encoding="utf-8")
    sys.exit(not all(cell.startswith("ok") for cell in cells.values()))


def product() -> list[Entry]:
    """Attention kernels of the models that TPUs are compiled for; twins are left out."""
    return [
        e
        for e in served_entries()
        if e.target in TARGETS and e.kernel in KERNELS and e.pool in POOLS and e.shape in MODELS
    ]


def fingerprint() -> str:
    """Changes with the kernels, with what is compiled of them, and with the compiler."""
    digest = hashlib.sha256()
    paths = {path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()}
    for path in sorted(path for path in paths if "__pycache__" not in path.parts):
        digest.update(path.read_bytes())
    for package in PACKAGES:
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()[:16]


def cell_of(entry: Entry, result: Result) -> str:
    """ "ok", with registers and KiB of shared memory of the largest kernel, or what is wrong."""
    if found := faults(entry, result):
        return found[0]
    if not result.kernels:
        return "ok"
    registers = max(kernel.registers for kernel in result.kernels)
    shared = max(kernel.shared_bytes for kernel in result.kernels)
    return f"ok, {registers}, {round(shared / 1024)} KiB"


def compile_missing(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Result]]:
    """Compiles for several targets at once and yields what is done."""
    waiting: queue.SimpleQueue[tuple[str, list[Entry]]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Entry, Result] | None] = queue.SimpleQueue()
    for target in TARGETS:
        if mine := [entry for entry in entries if entry.target == target]:
            waiting.put((target, mine))

    def work() -> None:
        try:
            while True:
                for item in compile_all(*waiting.get_nowait()):
                    done.put(item)
        except queue.Empty:
            done.put(None)

    for _ in range(NUM_PROCESSES):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(NUM_PROCESSES):
        yield from iter(done.get, None)


def page(cells: dict[Entry, str]) -> str:
    """The Markdown page: a row per shape, block size, pool and kernel, a column per target."""
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in PACKAGES)
    num_ok = sum(cell.startswith("ok") for cell in cells.values())
    lines = [
        "# What compiles for which GPU",
        "",
        f"Written by `python -m tests.aot.gpu_table` with {versions}:",
        f"{num_ok} of {len(cells)} programs compile, keep within their bounds and leave the pool",
        "where it is. Nothing here was run on a GPU.",
        "",
        "- `ok, n, m KiB`: n registers a thread and m KiB of shared memory a block, of the kernel "
        "that takes most.",
        "- Nothing is spilled, but by Mosaic's prefill with heads of 256: at most "
        f"{BOUNDS['mosaic_prefill'].spill_bytes} bytes a thread.",
        "- H200 runs what is compiled for H100; float16 and float8_e5m2 differ from their twins in "
        "casts. Writes are XLA's; copies know no heads, and are "
        "compiled by the tests.",
        "- `refused: why`: the kernel does not take the pool or the heads, and says so.",
        "- `-`: there is no such kernel for the target.",
        "",
        f"| shape | block size | pool | kernel | {' | '.join(TARGETS)} |",
        "| --- " * (4 + len(TARGETS)) + "|",
    ]
    for name, shape in MODELS.items():
        for block_size in shape.block_sizes:
            for pool in POOLS:
                for kernel in KERNELS:
                    entries = [Entry(t, kernel, name, block_size, pool) for t in TARGETS]
                    row = [_shown(entry, cells) for entry in entries]
                    if not any(is_offered(e) and refusal(e) is None for e in entries):
                        continue
                    lines.append(
                        f"| {name} | {block_size} | {pool} | {kernel} | {' | '.join(row)} |"
                    )
    return "\n".join(lines) + "\n"


def _shown(entry: Entry, cells: dict[Entry, str]) -> str:
    if not is_offered(entry):
        return "-"
    if (why := refusal(entry)) is not None:
        return f"refused: {why}"
    return cells[entry].replace("|", "\\|")


if __name__ == "__main__":
    main()
