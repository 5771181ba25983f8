"""References of a kernel by name."""

from collections.abc import Iterable
from typing import Any


class Refs:
    """Which references a kernel has depends on its options, so they are looked up by name."""

    def __init__(self, names: Iterable[str], refs: Iterable[Any]):
        self._refs = dict(zip(names, refs, strict=True))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._refs[name]
        except KeyError:
            raise AttributeError(f"no reference {name!r}") from None

    def __getitem__(self, name: str) -> Any:
        return self._refs[name]

    def __contains__(self, name: str) -> bool:
        return name in self._refs
