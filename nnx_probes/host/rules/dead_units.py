"""Units that never fire."""

from __future__ import annotations

from dataclasses import dataclass

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.rules.nonfinite import poisoned

__all__ = ["DeadUnits"]


@dataclass(frozen=True)
class DeadUnits(Rule):
    """At least `warn` of a layer's units were 0 on every sample of the window: WARN; all of them: ERROR.

    The window is that of `ActivationProbe`. A plain share of zeros says nothing: 50 to 95 % are usual behind a ReLU.

    Delay: the window of the probe.

    Args:
      warn: share of dead units.
    """

    warn: float = 0.9

    slug = "dead_units"
    reads = ("activations.dead",)
    optional = True  # its probe needs the user's forward function, so it is in no default set
    by_leaf = True

    def check(self, record: Record, history: History) -> Alert | None:
        paths, dead = record.leaves["activations"].paths, record.values["activations.dead"]
        rows = dead >= self.warn
        if not rows.any() or poisoned(record):
            return None
        found = tuple(path for path, row in zip(paths, rows, strict=True) if row)
        worst = float(dead[rows].max())
        level = Level.ERROR if worst >= 1 else Level.WARN
        message = (
            f"In {len(found)} of {len(paths)} measured places at least {self.warn:.0%} of the units were exactly 0 on every "
            f"sample for {int(record.get('activations.window', 0))} steps; first in {found[0]} ({float(dead[rows][0]):.0%})."
        )
        return Alert(record.step, self.slug, level, "Units are dead", message, found, values={"share": worst})
