"""Compiled programs kept on disk between processes."""

import hashlib
import logging
import os
import platform
from importlib.metadata import version
from pathlib import Path

import jax

_logger = logging.getLogger("paged_jax")


def use_compilation_cache(cache_dir: Path) -> None:
    """Turns JAX's persistent compilation cache on, unless the user has set one.

    The directory is named by jaxlib's version and the processor's features, because XLA:CPU
    programs use the instructions of the machine they were compiled on.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    name = f"jaxlib-{version('jaxlib')}-{platform.machine()}-{_cpu_features()}"
    path = cache_dir / "xla" / name
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _logger.warning("compiled programs are not kept: %s", error)
        return
    if os.access(path, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(path))


def _cpu_features() -> str:
    text = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            wanted = ("model name", "flags", "Features")
            text = "".join(sorted({line for line in lines if line.startswith(wanted)}))
    except OSError:
        pass
    return hashlib.sha256(text.encode()).hexdigest()[:12]
