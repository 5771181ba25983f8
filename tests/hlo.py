"""What XLA made of a program, read from its text."""

import math
import re
from collections.abc import Iterator

# `%name = type opcode(`; a type is an array or a tuple, and no space stands before a bracket in it.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z\d-]*)\(")
_ARRAY = re.compile(r"[a-z]\w*\[([\d,]+)\](?:\{([\d,]*)([^}]*))?")

# What moves nothing: names for a buffer, control flow, and updates, which XLA does in place if it
# can and with a copy, which is then an instruction of its own, if it cannot. The body of a fusion
# is in the text too.
_IN_PLACE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "fusion",
    "custom-call", "dynamic-update-slice", "scatter", "copy-done", "opt-barrier",
}  # fmt: skip


def pool_copies(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Copies of the pool's or of a layer's shape in HLO text."""
    whole = ",".join(map(str, shape))
    layer = ",".join(map(str, shape[1:]))
    pattern = (
        rf"= \(?\w+\[(?:{whole}|(?:1,)?{layer})\]\S* (?:copy|copy-start|dynamic-slice|slice)\("
    )
    return re.findall(pattern, hlo)


def pool_faults(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Whatever moves a pool `[L, ...]` or a layer of it, under any shape, in optimised HLO text.

    Stricter than `pool_copies`, for programs whose every pool access is a kernel's: a transposed,
    reshaped or converted pool counts too, and so does a pool in another layout than row-major,
    which a kernel cannot take without a copy in every call.
    """
    faults = []
    for name, dims, layout, memory, opcode in _arrays(hlo):
        size = math.prod(dims)
        if size in (math.prod(shape), math.prod(shape[1:])) and opcode not in _IN_PLACE:
            faults.append(f"{opcode} of {list(dims)} in {memory}: {name}")
        if sorted(dims) == sorted(shape) and layout != sorted(layout, reverse=True):
            faults.append(f"layout {layout} of {list(dims)}: {name}")
    return list(dict.fromkeys(faults))


def moved_sizes(hlo: str) -> set[int]:
    """How many numbers the arrays hold that a program copies, slices, transposes or converts."""
    moves = {"copy", "copy-start", "transpose", "convert", "slice", "dynamic-slice", "concatenate"}
    return {math.prod(dims) for _, dims, _, _, opcode in _arrays(hlo) if opcode in moves}


def _arrays(hlo: str) -> Iterator[tuple[str, tuple[int, ...], list[int], str, str]]:
    """(name, dims, minor-to-major layout, memory, opcode) of every array an instruction makes."""
    for line in hlo.splitlines():
        if (match := _INSTRUCTION.match(line)) is None:
            continue
        name, type_, opcode = match.groups()
        for dims, layout, tiling in _ARRAY.findall(type_):
            memory = "VMEM" if "S(1)" in tiling else "HBM"
            yield name, _numbers(dims), list(_numbers(layout)), memory, opcode


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
