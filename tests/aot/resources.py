"""What kernels of a compiled GPU program take, and which of them sit in a CUDA graph.

XLA writes the PTX of every kernel and the list of launches where it is told to dump; `ptxas` of the
wheel nvidia-cuda-nvcc assembles the PTX again and says how many registers that takes. Mosaic GPU
assembles by itself and prints the same lines.
"""

import functools
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

MOSAIC_ENVIRONMENT = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}
"""Makes Mosaic GPU print what `mosaic_kernels` reads."""

_COMPILED = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
# `  012: kCustomKernel [prev=011 (1) | sink] name grid: [..] threads: [..]  shared_memory: 0 bytes`
_THUNK = re.compile(
    r"^( *)\d+: k(\w+)\s*\[[^\]]*\] ?([^\s:]*)(?:.*shared_memory: (\d+) bytes)?", re.MULTILINE
)
_CUSTOM_CALL = re.compile(
    r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|mosaic_gpu_v2)".*?'
    r'op_name="[^"]*?(\w+)/(?:pallas_call|mpmd_map|core_map)"'
)
# What holds other thunks, or hands out buffers without a launch.
_NO_LAUNCH = {"CommandBuffer", "Sequential", "Conditional", "While", "HostSend", "HostRecv"}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What one kernel takes; per block, but registers per thread."""

    name: str
    registers: int
    spill_bytes: int  # stores and loads
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class CommandBuffers:
    """CUDA graphs of a program, and launches by kind and name in the order of the program."""

    count: int
    inside: tuple[str, ...]
    outside: tuple[str, ...]
    loops: tuple[str, ...]  # kinds: "While" ends a graph, "Conditional" where it holds a "While"


def dump_options(directory: str | os.PathLike) -> dict[str, str]:
    """Options of XLA that make it write what `kernels` and `command_buffers` read."""
    return {"xla_dump_to": os.fspath(directory), "xla_dump_emitter_re": "ptx"}


def kernels(dump_dir: str | os.PathLike, names: Iterable[str]) -> tuple[Kernel, ...]:
    """Kernels of some names that XLA compiled, Triton's or its own.

    Two kernels of one name are called `name` and `name__1`.
    """
    shared, found = {}, []
    for _, _, name, num_bytes in _thunks(_read(dump_dir, "*.thunk_sequence.txt")):
        shared[name] = max(shared.get(name, 0), int(num_bytes or 0))
    wanted = set(names)
    for path in Path(dump_dir).glob("*.ptx"):
        ptx = path.read_text(encoding="utf-8")
        if wanted & {base_name(entry) for entry in _ENTRY.findall(ptx)}:
            found += parse_ptxas(_assemble(ptx))
    # Of shared memory `ptxas` knows only what has a fixed size; the launch has all of it.
    found = [replace(k, shared_bytes=max(k.shared_bytes, shared.get(k.name, 0))) for k in found]
    return tuple(sorted(found, key=lambda kernel: kernel.name))


def mosaic_kernels(log: str) -> tuple[Kernel, ...]:
    """Kernels that Mosaic GPU assembled, from what it printed.

    A process assembles equal kernels once, so that only the first program that has one lists it.
    Resources are printed without a name: each kernel is given the largest shared memory of any.
    """
    sizes = [0]
    for line in re.findall(r"^Resources\(.*$", log, re.MULTILINE):
        scratch = int(re.search(r"smem_scratch_bytes=(\d+)", line)[1])
        barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", line)
        sizes.append(scratch + sum(8 * int(size) * int(count) for size, count in barriers))
    found = parse_ptxas(log)
    return tuple(replace(k, shared_bytes=k.shared_bytes + max(sizes)) for k in found)


def parse_ptxas(text: str) -> list[Kernel]:
    """Reads what `ptxas -v` says of entry functions; functions that they call are left out."""
    found = []
    for part in re.split(r"(?=ptxas info +: Compiling entry function)", text):
        if (name := _COMPILED.search(part)) is None:
            continue
        spills, used = _SPILLS.search(part), _USED.search(part)
        if spills is None or used is None:
            raise ValueError(f"ptxas says nothing of registers and spills: {part!r}")
        found.append(
            Kernel(
                name=name[1],
                registers=int(used[1]),
                spill_bytes=sum(map(int, spills.groups())),
                shared_bytes=int(used[2] or 0),
            )
        )
    return found


def command_buffers(dump_dir: str | os.PathLike) -> CommandBuffers:
    """What XLA records as CUDA graphs: a graph costs one launch, each kernel outside another."""
    # The second list is there only if a pass changed anything, such as making a graph.
    passes = "*.thunk_sequence_after_thunk_passes.txt"
    name = passes if any(Path(dump_dir).glob(passes)) else "*.thunk_sequence.txt"
    return parse_command_buffers(_read(dump_dir, name))


def parse_command_buffers(text: str) -> CommandBuffers:
    """Reads a list of thunks, in which what is inside another one stands further right."""
    count, depth = 0, None
    inside, outside, loops = [], [], []
    for indent, kind, name, _ in _thunks(text):
        if depth is not None and len(indent) <= depth:
            depth = None
        if kind == "CommandBuffer":
            count, depth = count + 1, len(indent)
        elif kind in ("While", "Conditional"):
            loops.append(kind)
        elif kind not in _NO_LAUNCH:
            (outside if depth is None else inside).append(f"{kind} {name}")
    return CommandBuffers(
        count=count, inside=tuple(inside), outside=tuple(outside), loops=tuple(loops)
    )


def pallas_calls(hlo: str) -> list[str]:
    """Names of Pallas kernels in HLO text, one for each call."""
    return _CUSTOM_CALL.findall(hlo)


def _thunks(text: str) -> Iterable[tuple[str, str, str, str]]:
    """(indent, kind, name, bytes of shared memory) of every thunk in a list."""
    return _THUNK.findall(text)


def _read(dump_dir: str | os.PathLike, pattern: str) -> str:
    texts = [path.read_text(encoding="utf-8") for path in Path(dump_dir).glob(pattern)]
    if len(texts) != 1:
        raise FileNotFoundError(f"{len(texts)} files {pattern} in {dump_dir}, where one should be")
    return texts[0]


def base_name(kernel: str) -> str:
    """A kernel's name without the number that tells it from others of its name."""
    return re.sub(r"__\d+$", "", kernel)


def _assemble(ptx: str) -> str:
    """What `ptxas -v` says; CalledProcessError where it fails."""
    command = [_ptxas(), "-v", f"-arch={_TARGET.search(ptx)[1]}", "-", "-o", os.devnull]
    return subprocess.run(command, input=ptx, check=True, capture_output=True, text=True).stderr


@functools.cache
def _ptxas() -> Path:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob("*/bin/ptxas"):
            return path
    raise RuntimeError("no ptxas: install the extra 'aot-gpu' in an environment of its own")
