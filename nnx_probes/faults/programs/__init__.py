"""The five programs. A new one is one file here and one line in `PROGRAMS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from nnx_probes.faults.programs import conv, dense, experts, recurrent, transformer
from nnx_probes.faults.recipe import Recipe

__all__ = ["PROGRAMS", "REPORTED", "TUNING"]

PROGRAMS: Mapping[str, Callable[[], Recipe]] = MappingProxyType(
    {
        "mlp": dense.recipe,
        "experts": experts.recipe,
        "conv": conv.recipe,
        "transformer": transformer.recipe,
        "recurrent": recurrent.recipe,
    }
)
TUNING = ("mlp", "experts")
"""Programs that thresholds may be chosen on."""
REPORTED = ("conv", "transformer", "recurrent")
"""Programs that rates are reported of."""
