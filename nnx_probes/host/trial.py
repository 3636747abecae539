"""What the optimizer would do with a unit gradient: read from a record, used to explain a standstill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.record import Leaves, Record

__all__ = ["Trial"]


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of applying the optimizer to a gradient of ones, on copies (measured on the device).

    Attributes:
      update: float32[n], largest magnitude of the update of each model leaf now; NaN where not trained.
      absorbed: float32[n], share of elements whose update is not zero and yet ``p + u == p``; NaN likewise.
      later, earlier: largest update over all leaves at later and at earlier schedule counts.
    """

    update: np.ndarray
    absorbed: np.ndarray
    later: float
    earlier: float

    @classmethod
    def read(cls, record: Record) -> Trial | None:
        """Returns the trial that `record` holds, None if it holds none."""
        if "params.trial_update" not in record:
            return None
        return cls(
            record.values["params.trial_update"],
            record.values["params.trial_absorbed"],
            float(record.values["trial.later"]),
            float(record.values["trial.earlier"]),
        )

    @property
    def zero_now(self) -> bool:
        """Whether a gradient of ones moves nothing at the present count."""
        return float(np.nanmax(self.update, initial=0.0)) == 0.0

    @property
    def moves_later(self) -> bool:
        """Whether it would move something at a later count."""
        return self.later > 0

    @property
    def absorbed_share(self) -> float:
        """Mean share of absorbed elements over the leaves."""
        return float(np.nanmean(self.absorbed)) if np.isfinite(self.absorbed).any() else 0.0

    def leaves_zero(self, leaves: Leaves | None, rows: np.ndarray) -> bool:
        """Whether exactly these leaves get a zero update while others get one: left out by design."""
        if leaves is None or len(rows) != len(self.update):
            return False
        return bool((self.update[rows] == 0).all()) and not self.zero_now
