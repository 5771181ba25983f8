"""What is known of the GPU that a program is traced for."""

import re
from typing import Any

import jax


def known() -> Any | None:
    """The mesh's abstract device if that is a GPU, else one of the default backend if that is."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract if abstract.platform == "gpu" else None
    return jax.devices()[0] if jax.default_backend() == "gpu" else None


def name() -> str | None:
    """Name of the device's table file, such as "h100"; None where the device is not known."""
    device = known()
    if device is None:
        return None
    kind = device.device_kind.lower()  # such as "nvidia h100 80gb hbm3"
    short = re.search(r"\b[a-z]{1,2}\d{1,4}[a-z]?\b", kind)
    return short.group() if short else re.sub(r"\W+", "_", kind)


def capability() -> tuple[int, int] | None:
    """Compute capability of the device; None where it is not known."""
    version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(known(), "compute_capability", "")))
    return None if version is None else (int(version[1]), int(version[2]))
