"""The built-in rules, one small frozen class each; thresholds are constructor arguments.

A new rule is one file here and one line in `DEFAULTS`.
"""

from __future__ import annotations

from nnx_probes.errors import ArgumentError, closest
from nnx_probes.host.rule import Rule
from nnx_probes.host.rules.frozen_params import FrozenParams
from nnx_probes.host.rules.lost_update import LostUpdate
from nnx_probes.host.rules.nonfinite import Nonfinite
from nnx_probes.host.rules.optimizer_reset import OptimizerReset
from nnx_probes.host.rules.usage import Usage

__all__ = ["DEFAULTS", "FrozenParams", "LostUpdate", "Nonfinite", "OptimizerReset", "Usage", "default"]

DEFAULTS: tuple[type[Rule], ...] = (Nonfinite, LostUpdate, FrozenParams, OptimizerReset, Usage)


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
