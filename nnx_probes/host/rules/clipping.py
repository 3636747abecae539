"""Gradient clipping that is always on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["Clipping"]


@dataclass(frozen=True)
class Clipping(Rule):
    """Nearly every update is clipped: INFO, since some recipes mean it so; the rate then sets the step size alone.

    Under ``optax.MultiSteps`` the gradient of a micro-step is compared, which is longer than the mean that is clipped.

    Reads the limit of ``optax.clip_by_global_norm`` off the optimizer's chain and compares the gradients' norm before it.

    Delay: `probes` probes.

    Args:
      share: share of clipped updates.
      probes: over how many probes.
    """

    share: float = 0.9
    probes: int = 128

    slug = "clipping"
    reads = ("grads.norm", "grads.clip_norm")

    def check(self, record: Record, history: History) -> Alert | None:
        _, norms = history.since_mark("grads.norm")
        norms, limit = norms[-self.probes :], float(record.values["grads.clip_norm"])
        norms = norms[np.isfinite(norms)]
        if len(norms) < self.probes or float(np.mean(norms > limit)) <= self.share:
            return None
        message = (
            f"{float(np.mean(norms > limit)):.0%} of the last {len(norms)} probed gradients were longer than max_norm="
            f"{limit:g} (median {float(np.median(norms)):.3g}): clipping shapes nearly every update."
        )
        return Alert(
            record.step, self.slug, Level.INFO, "Nearly every update is clipped", message, values={"limit": limit}
        )
