"""A table of a backend's attention: its entries, and their kernels as programs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.cover import Value, pairwise
from tests.kernels.cases import LAYER, SM_SCALE, Inputs
from tests.kernels.conformance import row_range

SHAPES = ("head_dim", "group", "num_kv_heads", "block_size")
"""Factors that are no kernel, dtype or option."""

Program = Callable[..., tuple[jax.Array, jax.Array | None]]


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A few entries in which every two values of two factors meet that may.

    Attributes:
      entry: A NamedTuple of a value of every factor, with what `tests.kernels.conformance` needs.
      factors: Values by name.
      may_meet: Whether two values of two factors go together, see `tests.cover.pairwise`.
      attend: attend(entry, *operands, **options) calls the entry's kernel with its configuration.
    """

    entry: Callable[..., Any]
    factors: dict[str, Sequence]
    may_meet: Callable[[Value, Value], bool]
    attend: Program

    @functools.cached_property
    def entries(self) -> tuple[Any, ...]:
        """All of them, the same every time."""
        return tuple(self.entry(**chosen) for chosen in pairwise(self.factors, self.may_meet))

    @functools.cached_property
    def typical(self) -> frozenset[Any]:
        """A few of the entries, in which every kernel, dtype and option occurs."""
        missing = {
            (name, value)
            for name, values in self.factors.items()
            for value in values
            if name not in SHAPES
        }
        chosen = set()
        while missing:
            # Few heads compile and run faster.
            best = max(
                self.entries,
                key=lambda entry: (
                    len(missing & set(entry._asdict().items())),
                    -entry.group * entry.num_kv_heads,
                ),
            )
            chosen.add(best)
            missing -= set(best._asdict().items())
        return frozenset(chosen)

    def program(self, entry: Any) -> Program:
        """The kernel of an entry: other lengths, tables and values compile nothing."""

        @jax.jit
        def run(q, kv, scales, tables, context_lens, query_starts, sinks, first_row, num_rows):
            operands = q, kv, LAYER, tables, context_lens
            options = {
                "sm_scale": SM_SCALE,
                "num_kv_heads": entry.case.num_kv_heads,
                "scales": scales,
                "sliding_window": entry.case.sliding_window,
                "soft_cap": entry.case.soft_cap,
                "sinks": sinks,
                "num_rows": num_rows,
                "return_lse": entry.return_lse,
            }
            if entry.kernel == "decode":
                return self.attend(entry, *operands, **options)
            return self.attend(entry, *operands, query_starts, first_row=first_row, **options)

        return run

    def run(
        self, entry: Any, inputs: Inputs, rows: tuple[int, int] | None = None, **changed: Any
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Outputs and log-sum-exp of an entry; `changed` are arrays of `inputs` to replace."""
        return call(_compiled(self, entry), entry, inputs, rows, **changed)


@functools.lru_cache(maxsize=8)
def _compiled(table: Table, entry: Any) -> Program:
    return table.program(entry)


def call(
    program: Program,
    entry: Any,
    inputs: Inputs,
    rows: tuple[int, int] | None = None,
    **changed: Any,
) -> tuple[np.ndarray, np.ndarray | None]:
    """As `Table.run`, of a program that is given."""
    inputs = dataclasses.replace(inputs, **changed)
    first_row, num_rows = row_range(entry) if rows is None else rows
    out, lse = program(
        inputs.decode_q if entry.kernel == "decode" else inputs.prefill_q,
        inputs.cache.kv,
        inputs.cache.scales if inputs.cache.is_quantized else None,
        inputs.block_tables,
        inputs.context_lens,
        inputs.query_starts,
        inputs.sinks,
        jnp.int32(first_row),
        jnp.int32(num_rows),
    )
    return np.asarray(out), None if lse is None else np.asarray(lse)
