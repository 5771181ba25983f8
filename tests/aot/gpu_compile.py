"""Compiles entries for a GPU, each target in a process of its own, and says what is wrong.

Mosaic GPU keeps kernels in its process by a hash that does not hold the target, so that a process
must not compile for two of them; and some compilers abort where others raise.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from tests.aot import resources
from tests.aot.gpu_programs import calls, program
from tests.aot.gpu_shapes import SHAPES, is_mosaic
from tests.aot.resources import Kernel
from tests.aot.shapes import Entry
from tests.aot.targets import GPU_TARGETS, compile_for, device_of, reason, report

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the compiler made of an entry; all but `error` is empty if it made nothing."""

    error: str = ""
    temp_bytes: int = 0
    alias_bytes: int = 0
    donated_bytes: int = 0
    pool_bytes: int = 0
    moves: tuple[str, ...] = ()  # of pools, see `tests.hlo.pool_faults`
    calls: tuple[str, ...] = ()  # of Pallas kernels, by name
    kernels: tuple[Kernel, ...] = ()  # that are called so


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The most that a kernel may take in its default configuration."""

    registers: int
    shared_bytes: int
    spill_bytes: int = 0  # with heads of 256; others spill nothing


BOUNDS = {
    "triton_decode": Bounds(registers=255, shared_bytes=96 << 10),
    "triton_prefill": Bounds(registers=255, shared_bytes=164 << 10),
    "triton_copy": Bounds(registers=64, shared_bytes=0),
    "mosaic_decode": Bounds(registers=255, shared_bytes=227 << 10),
    # Heads of 256 spill: 64 rows of them fill the registers, and widening 8-bit numbers takes more.
    # None chooses Triton, which does not spill.
    "mosaic_prefill": Bounds(registers=255, shared_bytes=227 << 10, spill_bytes=2048),
}
"""By kernel; a target that has less shared memory bounds it further."""


def faults(entry: Entry, result: Result) -> list[str]:
    """Everything that is wrong with a result, worst first."""
    if result.error:
        return [result.error]
    found = list(result.moves)
    if result.alias_bytes < result.donated_bytes:
        found.append("donated pool is copied")
    if result.temp_bytes >= result.pool_bytes:
        found.append(f"{result.temp_bytes >> 20} MiB of temporaries")
    name, expected = calls(entry)
    if (count := result.calls.count(name)) != expected:
        found.append(f"{count} calls of {name}, {expected} expected")
    is_wide = SHAPES[entry.shape].head_dim > 128
    for kernel in result.kernels:
        bounds = BOUNDS[entry.kernel]
        shared = min(bounds.shared_bytes, GPU_TARGETS[entry.target].block_shared_bytes)
        if kernel.spill_bytes > (bounds.spill_bytes if is_wide else 0):
            found.append(f"{kernel.name} spills {kernel.spill_bytes} bytes")
        if kernel.registers > bounds.registers:
            found.append(f"{kernel.name} takes {kernel.registers} registers")
        if kernel.shared_bytes > shared:
            found.append(f"{kernel.name} takes {kernel.shared_bytes} bytes of shared memory")
    return found


def compile_entry(entry: Entry, log: int | None = None) -> Result:
    """Compiles in this process; whatever a compiler raises is a result.

    Args:
      log: Descriptor of the file that this process prints to; Mosaic's kernels are read from it.
    """
    jax.clear_caches()  # a worker compiles hundreds
    start = 0 if log is None else os.fstat(log).st_size
    try:
        device_of(entry.target)  # before anything asks JAX for a device
        made = program(entry)
        with tempfile.TemporaryDirectory() as dump_dir:
            options = resources.dump_options(dump_dir)
            compiled = compile_for(entry.target, made.fn, made.args, made.donate, options)
            names = resources.pallas_calls(compiled.as_text() or "")
            kernels = resources.kernels(dump_dir, names)
        found = report(compiled, [pool.shape for pool in made.pools])
    except Exception as error:
        return Result(error=reason(error))
    if log is not None:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # Mosaic prints through C
        kernels += resources.mosaic_kernels(os.pread(log, 1 << 24, start).decode())
    return Result(
        temp_bytes=found.temp_bytes,
        alias_bytes=found.alias_bytes,
        donated_bytes=made.donated_bytes,
        pool_bytes=made.pool_bytes,
        moves=found.faults,
        kernels=kernels,
        calls=tuple(names),
    )


def compile_all(target: str, entries: Iterable[Entry]) -> Iterator[tuple[Entry, Result]]:
    """Compiles the entries of one target in a process, and in a new one after each that died."""
    waiting = list(entries)
    assert all(entry.target == target for entry in waiting)
    while waiting:
        with tempfile.TemporaryFile() as log, _worker(target, log) as worker:
            worker.stdin.write("".join(json.dumps(entry) + "\n" for entry in waiting))
            worker.stdin.close()
            for line in worker.stdout:
                yield waiting.pop(0), _from_json(line)
            worker.wait()
            if waiting:
                log.seek(0)
                last = log.read().decode(errors="replace").strip().splitlines()[-1:]
                yield waiting.pop(0), Result(error=f"compiler died: {''.join(last)[:160]}")


def _worker(target: str, log: Any) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.aot.gpu_compile", target],  # the target is for `ps`
        cwd=ROOT,
        env=os.environ | resources.MOSAIC_ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )


def _from_json(line: str) -> Result:
    fields = json.loads(line)
    kernels = tuple(Kernel(**kernel) for kernel in fields.pop("kernels"))
    return Result(
        **{name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()},
        kernels=kernels,
    )


def main() -> None:
    """The worker: a line of JSON for each on standard input; prints nothing else."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print goes to the log
    for line in sys.stdin:
        entry = Entry(*json.loads(line))
        result = compile_entry(entry, log=2 if is_mosaic(entry.kernel) else None)
        print(json.dumps(asdict(result)), file=results, flush=True)


if __name__ == "__main__":
    main()
