"""The built-in rules, one small frozen class each; thresholds are constructor arguments.

A new rule is one file here and one line in `DEFAULTS`.
"""

from __future__ import annotations

from nnx_probes.errors import ArgumentError, closest
from nnx_probes.host.rule import Rule
from nnx_probes.host.rules.absorbed_updates import AbsorbedUpdates
from nnx_probes.host.rules.bad_batch import BadBatch
from nnx_probes.host.rules.chance_level import ChanceLevel
from nnx_probes.host.rules.clipping import Clipping
from nnx_probes.host.rules.dead_units import DeadUnits
from nnx_probes.host.rules.diverging import Diverging
from nnx_probes.host.rules.frozen_params import FrozenParams
from nnx_probes.host.rules.lost_update import LostUpdate
from nnx_probes.host.rules.nonfinite import Nonfinite
from nnx_probes.host.rules.optimizer_reset import OptimizerReset
from nnx_probes.host.rules.overfitting import Overfitting
from nnx_probes.host.rules.repeated_batch import RepeatedBatch
from nnx_probes.host.rules.skipped_updates import SkippedUpdates
from nnx_probes.host.rules.spike import Spike
from nnx_probes.host.rules.stale_state import StaleState
from nnx_probes.host.rules.stalled_loss import StalledLoss
from nnx_probes.host.rules.update_ratio import UpdateRatio
from nnx_probes.host.rules.usage import Usage
from nnx_probes.host.rules.vanishing_gradients import VanishingGradients
from nnx_probes.host.rules.zero_gradients import ZeroGradients

__all__ = [
    "DEFAULTS",
    "AbsorbedUpdates",
    "BadBatch",
    "ChanceLevel",
    "Clipping",
    "DeadUnits",
    "Diverging",
    "FrozenParams",
    "LostUpdate",
    "Nonfinite",
    "OptimizerReset",
    "Overfitting",
    "RepeatedBatch",
    "SkippedUpdates",
    "Spike",
    "StaleState",
    "StalledLoss",
    "UpdateRatio",
    "Usage",
    "VanishingGradients",
    "ZeroGradients",
    "default",
]

DEFAULTS: tuple[type[Rule], ...] = (
    Nonfinite,
    SkippedUpdates,
    LostUpdate,
    ZeroGradients,
    FrozenParams,
    AbsorbedUpdates,
    VanishingGradients,
    UpdateRatio,
    DeadUnits,
    StaleState,
    RepeatedBatch,
    BadBatch,
    Spike,
    Diverging,
    ChanceLevel,
    StalledLoss,
    Overfitting,
    Clipping,
    OptimizerReset,
    Usage,
)
"""In the order in which they are asked: what is better proven comes first."""


def default(**overrides: Rule | None) -> tuple[Rule, ...]:
    """Returns the built-in set, with some rules replaced or, by None, left out.

    Example::

        rules.default(nonfinite=rules.Nonfinite(allow=("loss",)), optimizer_reset=None)

    Raises:
      ArgumentError: a name is not the slug of a built-in rule.
    """
    slugs = [rule.slug for rule in DEFAULTS]
    for name in overrides:
        if name not in slugs:
            raise ArgumentError(f"{name!r} is not a built-in rule: expected one of {slugs}.{closest(name, slugs)}")
    chosen = [overrides[rule.slug] if rule.slug in overrides else rule() for rule in DEFAULTS]
    return tuple(rule for rule in chosen if rule is not None)
