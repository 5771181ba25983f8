"""What is known of the GPU that a program is traced for."""

import re

import jax


def kind() -> str | None:
    """Kind of the device, such as "NVIDIA H100 80GB HBM3"; None where it is not known."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.device_kind
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None


def name() -> str | None:
    """Name of the device's table file, such as "h100"; None where the device is not known."""
    found = kind()
    if found is None:
        return None
    short = re.search(r"\b[a-z]{1,2}\d{1,4}[a-z]?\b", found.lower())
    return short.group() if short else re.sub(r"\W+", "_", found.lower())


def capability() -> tuple[int, int] | None:
    """Compute capability of the device; None where it is not known."""
    found = jax.sharding.get_abstract_mesh().abstract_device
    if found is None and jax.default_backend() == "gpu":
        found = jax.devices()[0]
    version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(found, "compute_capability", "")))
    return None if version is None else (int(version[1]), int(version[2]))
