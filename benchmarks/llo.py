"""The steady path through a kernel, read from the machine code that the TPU compiler dumps.

`*-final_bundles.txt` lists the instruction bundles of a kernel, one a line, with its branches and
the regions that they lead to; `*-static-per-bundle-utilization.txt` has a row for each bundle with
the slots that it fills. `steady_path` walks the loop over items as an item does that neither begins
nor ends a row and of whose keys all are seen:

    passed by   what copies blocks one by one in a loop, what only loads, stores or copies elsewhere
    entered     what starts the copies of whole items, and of the bodies with matrix products the
                one that has no loop and, among equals, no masks: the shortest

All that stands between is on the path, predicated instructions included. A branch costs its delay
slots and a wait nothing: such a schedule knows no stalls.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=.*final_(hlo|bundles).*"
)
"""For LIBTPU_INIT_ARGS, which is read when the compiler is loaded. Without the pattern a kernel
leaves seventy files."""

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+[A-Z]*\s*:[ >]*(\{.*)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel \(.*?\) target = \$region(\d+)")
_COPY = re.compile(r"dma\.(?:hbm_to_vmem|general) .*?/\*size_in_granules=\*/(\w+)")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Bundles of a kernel, and what each of them fills of the slots that a bundle has."""

    bundles: tuple[str, ...]
    slots: dict[str, int]
    filled: tuple[dict[str, int], ...]
    delay_slots: int
    """Bundles after a branch that are executed whether it is taken or not: at most so many."""

    @cached_property
    def branches(self) -> dict[int, int]:
        """Bundle of each branch and the bundle that it leads to."""
        starts = {int(n): i for i, text in enumerate(self.bundles) for n in _REGION.findall(text)}
        found = {i: _BRANCH.findall(text) for i, text in enumerate(self.bundles)}
        # The end of a kernel is not always marked.
        end = len(self.bundles)
        return {i: starts.get(int(to[0]), end) for i, to in found.items() if to}

    def fall_through(self, branch: int) -> int:
        """The bundle that follows a branch and its delay slots, where something ends them early."""
        begin, end = branch + 1, min(branch + 1 + self.delay_slots, len(self.bundles))
        return next((i for i in range(begin, end) if i in self._block_starts), end)

    @cached_property
    def _block_starts(self) -> set[int]:
        marked = {i for i, text in enumerate(self.bundles) if _REGION.search(text)}
        return marked | set(self.branches.values())

    @cached_property
    def products(self) -> set[int]:
        """Bundles that start a matrix product."""
        return {i for i, text in enumerate(self.bundles) if "vmatmul" in text}

    @cached_property
    def copies(self) -> set[int]:
        """Bundles that start the copy of a block: the copy whose size is the most frequent."""
        sizes = {i: _COPY.findall(text) for i, text in enumerate(self.bundles)}
        counts = Counter(size for found in sizes.values() for size in found)
        if not counts:
            raise ValueError("the kernel copies nothing from HBM to VMEM")
        ((block, _),) = counts.most_common(1)
        return {i for i, found in sizes.items() if block in found}

    def shares(self, path: tuple[int, ...]) -> dict[str, float]:
        """Slots that a path fills, of those that it has, by kind, the fullest first."""
        shares = {
            kind: sum(self.filled[i][kind] for i in path) / (count * len(path))
            for kind, count in self.slots.items()
        }
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Bundles that one item takes: all of them, and those of its products and softmax."""

    item: tuple[int, ...]
    body: tuple[int, ...]


def read_kernel(folder: Path, name: str, *, delay_slots: int) -> Kernel:
    """Reads the newest dump of a kernel.

    Raises: ValueError without one, or with one that is not understood.
    """
    files = sorted(folder.glob(f"*{name}*-final_bundles.txt"))
    files = [file for file in files if "schedule-analysis" not in file.name]
    if not files:
        raise ValueError(f"no bundles of {name} in {folder}")
    lines = files[-1].read_text(errors="replace").splitlines()
    bundles = tuple(match[1] for line in lines if (match := _BUNDLE.match(line)))
    prefix = files[-1].name.rsplit("-", 2)[0]
    (table,) = folder.glob(f"{prefix}-*final_hlo-static-per-bundle-utilization.txt")
    _, names, counts, _, *rows = table.read_text().splitlines()
    kinds = [kind.strip() for kind in names.split(",")]
    filled = tuple(dict(zip(kinds, map(int, row.split()), strict=True)) for row in rows if row)
    if abs(len(filled) - len(bundles)) > 1:
        raise ValueError(f"{table.name} has {len(filled)} rows for {len(bundles)} bundles")
    slots = dict(zip(kinds, map(int, counts.split()), strict=True))
    return Kernel(bundles=bundles, slots=slots, filled=filled, delay_slots=delay_slots)


def steady_path(kernel: Kernel) -> Steady:
    """Walks the innermost loop that both copies and computes."""
    loops = [(to, kernel.fall_through(at)) for at, to in kernel.branches.items() if to <= at]
    whole = [loop for loop in loops if _holds(kernel.products, loop)]
    whole = [loop for loop in whole if _holds(kernel.copies, loop)]
    if not whole:
        raise ValueError("no loop both copies and computes")
    begin, end = min(whole, key=lambda loop: loop[1] - loop[0])
    inner = [loop for loop in loops if begin < loop[0] and loop[1] < end]
    blocks = {at: (kernel.fall_through(at), to) for at, to in kernel.branches.items() if to > at}
    computing = [b for b in blocks.values() if begin <= b[0] < end and _holds(kernel.products, b)]
    # Bodies hold no other. That of whole items is laid out without a loop.
    others = [*computing, *inner]
    bodies = [
        b for b in computing if not any(b[0] <= c[0] and c[1] <= b[1] and b != c for c in others)
    ]
    if not bodies:
        raise ValueError("every product is in a loop inside the loop over items")
    # It computes as much as any, and what masks is longer.
    counts = {b: sum(b[0] <= i < b[1] for i in kernel.products) for b in bodies}
    body = min(bodies, key=lambda b: (counts[b] < max(counts.values()), b[1] - b[0]))
    once = {i for i in kernel.copies if not any(a <= i < b for a, b in inner)}

    def is_entered(block: tuple[int, int]) -> bool:
        if _holds(kernel.products, block):
            return block[0] <= body[0] and body[1] <= block[1]
        return _holds(once, block)

    path, at = [], begin
    while at < end:
        path.append(at)
        if at in blocks and not is_entered(blocks[at]):
            path += range(at + 1, blocks[at][0])
            at = max(blocks[at])
        else:
            at += 1
    return Steady(item=tuple(path), body=tuple(range(*body)))


def _holds(found: set[int], interval: tuple[int, int]) -> bool:
    return any(interval[0] <= i < interval[1] for i in found)
