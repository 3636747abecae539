"""What a rule is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from nnx_probes.host.alert import Alert
from nnx_probes.host.history import History
from nnx_probes.host.record import Record

__all__ = ["Rule"]


class Rule(ABC):
    """Looks at one record and its history and may return an alert.

    A rule is a pure function of what was recorded: it keeps no state, never touches the run, and gives the
    same answer live and over a stored file. Subclass it, usually as a frozen dataclass whose fields are the
    thresholds::

        @dataclass(frozen=True)
        class LossBelowZero(Rule):
            slug = "loss_below_zero"
            reads = ("loss",)

            def check(self, record, history):
                if record.get("loss") < 0:
                    return Alert(record.step, self.slug, Level.WARN, "The loss is negative")

    Attributes:
      slug: the name its alerts carry.
      reads: names of values it needs; it is asked only about records that have all of them. A name ending in
        ``.*`` means any value of that group.
      optional: whether it is left out without a word where no callback provides what it reads.
      descends: whether it takes for granted that the loss is meant to fall; such a rule is left out where the monitor was
        told otherwise (``objective="adversarial"``).
      by_leaf: whether leaves that join an episode later are a new alert of their own.
    """

    slug: ClassVar[str] = ""
    reads: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[bool] = False
    descends: ClassVar[bool] = False
    by_leaf: ClassVar[bool] = False

    @abstractmethod
    def check(self, record: Record, history: History) -> Alert | None:
        """Returns an alert about `record`, or None.

        `history` already includes `record`. ``Alert.paths`` may hold all affected leaves (the library shortens
        the list); ``Alert.causes`` may stay empty, the library's own causes are added by slug.
        """

    def can_judge(self, record: Record) -> bool:
        """Whether `record` has everything in `reads`."""
        return all(_has(record, name) for name in self.reads)


def _has(record: Record, name: str) -> bool:
    if name.endswith(".*"):
        return any(key.startswith(name[:-1]) for key in record.values)
    return name in record.values
