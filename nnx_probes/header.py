"""What a run says of itself before its first record."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

from nnx_probes.callbacks.base import Callback
from nnx_probes.host.rule import Rule

__all__ = ["header"]

_PACKAGES = ("nnx-probes", "jax", "flax", "optax", "numpy")


def header(rules: Sequence[Rule], callbacks: Sequence[Callback], **settings: Any) -> dict[str, Any]:
    """Returns versions, devices and settings as plain values."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return {
        "versions": versions,
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "callbacks": [type(c).__name__ for c in callbacks],
        "rules": [repr(r) for r in rules],
        "settings": {k: v for k, v in settings.items()},
    }
