"""What the optimizer would do with a unit gradient: read from a record, used to explain a standstill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.record import Record

__all__ = ["Trial"]

_NOTHING = 1e-6
"""An update this much smaller than at other counts is none: compiled schedules that end at 0 leave a rest of a few
1e-9 (optax.linear_schedule(0.1, 0.0, 3) under jit on the CPU: -3.0e-9)."""


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
        return self._largest <= _NOTHING * max(self.earlier, self.later)

    @property
    def moves_later(self) -> bool:
        """Whether it would move something at a later count."""
        return self.later > _NOTHING * max(self.earlier, self._largest)

    @property
    def moved_earlier(self) -> bool:
        """Whether it would have moved something at an earlier count."""
        return self.earlier > _NOTHING * max(self.later, self._largest)

    @property
    def _largest(self) -> float:
        return float(np.nanmax(self.update, initial=0.0))

    @property
    def zeros(self) -> np.ndarray:
        """bool[n], leaves that get no update now; False where not trained."""
        found: np.ndarray = self.update <= _NOTHING * max(self.earlier, self.later, self._largest)
        return found

    def is_zero(self, rows: np.ndarray) -> bool:
        """Whether these leaves get no update now."""
        return bool(self.zeros[rows].all())

    @property
    def absorbed_share(self) -> float:
        """Mean share of absorbed elements over the leaves."""
        return float(np.nanmean(self.absorbed)) if np.isfinite(self.absorbed).any() else 0.0
