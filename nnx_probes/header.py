"""What a run says of itself before its first record."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import jax

from nnx_probes.callbacks.base import Callback
from nnx_probes.host.history import Facts
from nnx_probes.host.rule import Rule

__all__ = ["header"]

_BUILT_IN = "nnx_probes.host.rules"
_PACKAGES = ("nnx-probes", "jax", "flax", "optax", "numpy")


def header(rules: Sequence[Rule], callbacks: Sequence[Callback], facts: Facts, **settings: Any) -> dict[str, Any]:
    """Returns versions, devices and settings as plain values, and all that `nnx_probes.report` needs to judge again."""
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
        "rules": [_named(r) for r in rules],
        "facts": asdict(facts),
        "settings": {k: v for k, v in settings.items()},
    }


def _named(rule: Rule) -> str:
    """The rule as an expression; that of a user's own begins with its module, so that no built-in one is taken for it."""
    text, module = repr(rule), type(rule).__module__
    own = not module.startswith(f"{_BUILT_IN}.") and not text.startswith("<")
    return f"{module}.{text}" if own else text
