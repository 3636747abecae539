"""Likely causes of an alert, ranked.

A new cause is one `Explanation` in one of the tables here; what it may refer to is in `evidence`.
"""

from __future__ import annotations

from dataclasses import replace

from nnx_probes.host.alert import Alert
from nnx_probes.host.causes.entry import Explanation
from nnx_probes.host.causes.evidence import gather
from nnx_probes.host.causes.gradients import GRADIENTS
from nnx_probes.host.causes.nonfinite import NONFINITE
from nnx_probes.host.causes.not_updating import NOT_UPDATING
from nnx_probes.host.causes.plateau import PLATEAU
from nnx_probes.host.causes.stale import STALE
from nnx_probes.host.history import History
from nnx_probes.host.record import Record

__all__ = ["EXPLANATIONS", "Explanation", "diagnose"]

EXPLANATIONS: tuple[Explanation, ...] = (*NOT_UPDATING, *NONFINITE, *GRADIENTS, *PLATEAU, *STALE)


def diagnose(alert: Alert, record: Record, history: History) -> Alert:
    """Returns `alert` with its causes, best first; causes the rule gave itself come before."""
    evidence = gather(alert, record, history)
    found = [cause for entry in EXPLANATIONS if (cause := entry.cause(alert.rule, evidence)) is not None]
    found.sort(key=lambda cause: -cause.score)
    return replace(alert, causes=alert.causes + tuple(found))
