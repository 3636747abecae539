"""What one probed step measured: plain NumPy values under dotted names.

Names are ``<group>.<statistic>`` for values per leaf (``"params.norm"``: float32[n_leaves]) and
``<group>.<statistic>`` or a bare word for one number (``"loss"``). The order of the leaves is that of
the `Leaves` table of the same group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Leaves", "Record"]


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves of one group: the row names of every per-leaf value.

    Attributes:
      group: ``"params"``, ``"optimizer"``, ``"grads"``, ``"updates"``, ``"metric_arrays"`` or ``"batch"``.
      paths: one dotted path a leaf, unique within the group.
      kinds: the Variable type's name (``"Param"``, ``"BatchStat"``), ``"array"`` for plain arrays.
      shapes, dtypes: as of the last walk.
      trained: whether the optimizer is meant to move the leaf.
    """

    group: str
    paths: tuple[str, ...]
    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    trained: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True, slots=True)
class Record:
    """All that was measured at one step.

    Attributes:
      step: index of the step just completed.
      time_s: wall time of the measurement, seconds since the epoch.
      values: dotted name -> float, int, str, bool, ``np.ndarray`` (one row a leaf) or a tuple of str
        (fingerprints, one a leaf).
      leaves: group name -> its `Leaves`.
    """

    step: int
    time_s: float
    values: Mapping[str, Any]
    leaves: Mapping[str, Leaves] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value called `name`, or `default`."""
        return self.values.get(name, default)
