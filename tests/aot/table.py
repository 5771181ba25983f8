"""Compiles the whole product of factors and writes the result as a page: docs/tpu_compiles.md.

    python -m tests.aot.table        # an hour on two cores; goes on where it was stopped

Results are kept in build/tpu_compiles.jsonl under a fingerprint of kernels and compiler: after a
change of either, all is compiled again.
"""

import hashlib
import importlib.metadata
import json
import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import jax

from tests.aot.cover import served_entries
from tests.aot.programs import program
from tests.aot.shapes import FACTORS, SHAPES, Entry, is_refused
from tests.aot.targets import compile_for, reason, report

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "tpu_compiles.jsonl"
PAGE = ROOT / "docs" / "tpu_compiles.md"
NUM_PROCESSES = 2
SOURCES = (
    "pallas_kernels/options.py",
    "pallas_kernels/refs.py",
    "pallas_kernels/tpu/*.py",
    "tests/aot/programs.py",
    "tests/aot/shapes.py",
)


def main() -> None:
    """Compiles what the cache lacks, then writes the page; exit status 1 if anything failed."""
    cells, key = {}, fingerprint()
    if CACHE.exists():
        lines = map(json.loads, CACHE.read_text(encoding="utf-8").splitlines())
        cells = {Entry(*x["entry"]): x["cell"] for x in lines if x["key"] == key}
    missing = [entry for entry in served_entries() if entry not in cells]
    CACHE.parent.mkdir(exist_ok=True)
    with CACHE.open("a", encoding="utf-8") as cache:
        for done, (entry, cell) in enumerate(compile_all(missing), 1):
            cells[entry] = cell
            cache.write(json.dumps({"key": key, "entry": entry, "cell": cell}) + "\n")
            cache.flush()
            print(f"{done}/{len(missing)} {entry}: {cell}", file=sys.stderr)
    PAGE.write_text(page(cells), encoding="utf-8")
    sys.exit(not all(cell.startswith("ok") for cell in cells.values()))


def fingerprint() -> str:
    """Changes with the kernels, with what is compiled of them, and with the compiler."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    for package in ("jax", "libtpu"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()[:16]


def compile_cell(entry: Entry) -> str:
    """ "ok", with the KiB of temporaries if there are any, or what is wrong."""
    jax.clear_caches()  # a worker compiles hundreds
    try:
        made = program(entry)
        compiled = compile_for(entry.target, made.fn, made.args, made.donate)
        found = report(compiled, [pool.shape for pool in made.pools])
    # Whatever a compiler raises is a result here; the row says what it was.
    except Exception as error:
        return reason(error)
    if found.faults:
        return found.faults[0]
    if found.alias_bytes < made.donated_bytes:
        return "donated pool is copied"
    if found.temp_bytes >= made.most_temp_bytes:
        return f"{found.temp_bytes >> 20} MiB of temporaries"
    kib = round(found.temp_bytes / 1024)
    return f"ok, {kib} KiB" if kib else "ok"


def compile_all(entries: Iterable[Entry]) -> Iterator[tuple[Entry, str]]:
    """Compiles in parallel and yields what is done; a compiler that dies takes one entry along."""
    suspects = []
    waiting, running, executor = list(reversed(list(entries))), {}, _executor(NUM_PROCESSES)
    while waiting or running:
        while waiting and len(running) < NUM_PROCESSES:
            entry = waiting.pop()
            running[executor.submit(compile_cell, entry)] = entry
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        if any(_is_broken(future) for future in done):
            # It is not told which of the processes died, or of what: each is tried alone below.
            suspects += running.values()
            running, executor = {}, _executor(NUM_PROCESSES)
            continue
        for future in done:
            yield running.pop(future), future.result()
    executor.shutdown()
    for entry in suspects:
        with _executor(1) as alone:
            future = alone.submit(compile_cell, entry)
            yield entry, "compiler crashed" if _is_broken(future) else future.result()


def _executor(num_processes: int) -> ProcessPoolExecutor:
    # A fork of a process that has loaded the compiler would share its threads' locks.
    return ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"))


def _is_broken(future: Future) -> bool:
    return isinstance(future.exception(), BrokenProcessPool)


def page(cells: dict[Entry, str]) -> str:
    """The Markdown page: a row per shape, block size, pool and kernel, a column per target."""
    targets = FACTORS["target"]
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("jax", "libtpu"))
    num_ok = sum(cell.startswith("ok") for cell in cells.values())
    lines = [
        "# What compiles for which TPU",
        "",
        f"Written by `python -m tests.aot.table` with {versions}:",
        f"{num_ok} of {len(cells)} programs compile and leave the pool where it is.",
        "Nothing here was run on a TPU.",
        "",
        "- `ok`: no temporaries in HBM; `ok, n KiB`: so many of them.",
        "- `refused`: 8-bit pools need blocks of 128 positions on a TPU.",
        "",
        f"| shape | block size | pool | kernel | {' | '.join(targets)} |",
        "| --- " * (4 + len(targets)) + "|",
    ]
    for name, shape in SHAPES.items():
        for block_size in shape.block_sizes:
            for pool in FACTORS["pool"]:
                for kernel in shape.kernels:
                    entries = [Entry(t, kernel, name, block_size, pool) for t in targets]
                    row = ["refused" if is_refused(e) else cells[e] for e in entries]
                    row = [cell.replace("|", "\\|") for cell in row]
                    lines.append(
                        f"| {name} | {block_size} | {pool} | {kernel} | {' | '.join(row)} |"
                    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
