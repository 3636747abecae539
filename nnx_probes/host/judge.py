"""Puts the rules to each record: once an episode, guarded, explained."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nnx_probes.host.alert import MAX_PATHS, Alert, Level
from nnx_probes.host.causes import diagnose
from nnx_probes.host.history import Facts, History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.rules.frozen_params import FrozenParams

__all__ = ["QUIET_PROBES", "Judge"]

QUIET_PROBES = 64
"""Probes without a finding after which an episode is over and may be told again."""

_log = logging.getLogger("nnx_probes")
_FAILED = {
    "history": "a record could not be added to what is known of the run",
    "causes": "the causes of an alert could not be found",
}


@dataclass
class _Episode:
    level: Level
    paths: set[str] = field(default_factory=set)
    quiet: int = 0


class Judge:
    """Runs rules over records and keeps what they said apart: one alert a rule and group of leaves.

    Args:
      rules: asked in this order, each about every record that has what it reads.
      facts: what is known of the run.

    Attributes:
      history: the fold the rules see.
      broken: slug of each rule that raised -> how often; ``"history"`` where a record could not be folded in, ``"causes"``
        where an alert could not be explained. A broken rule is left out from then on, the other two are tried again.
      lost: what kept the last record from being folded into the history, None where nothing did.
    """

    def __init__(self, rules: Sequence[Rule], facts: Facts | None = None) -> None:
        self.rules = tuple(rules)
        self.history = History(facts or Facts())
        self.broken: dict[str, int] = {}
        self._episodes: dict[str, _Episode] = {}
        self._tried: dict[str, set[str]] = {}
        self._off: set[str] = set()
        self.lost: Exception | None = None

    def observe(self, record: Record) -> bool:
        """Takes in a record. Returns whether a trial of the optimizer would help to judge it."""
        self.lost = None
        with self._guarded("history"):
            self.history.observe(record)
        asks = False
        if "params.fingerprint" in record and self.lost is None:
            for rule in self.rules:
                if isinstance(rule, FrozenParams) and rule.slug not in self._off:
                    with self._guarded(rule.slug, rule):
                        asks |= self._asks(rule, record)
        return asks

    def _asks(self, rule: FrozenParams, record: Record) -> bool:
        """Whether leaves are under suspicion that were not at the last trial, or any while nothing has been said of them."""
        rows = rule.suspects(self.history)
        paths = {p for p, row in zip(record.leaves["params"].paths, rows, strict=True) if row}
        if not paths or (rule.slug in self._episodes and paths <= self._tried.get(rule.slug, set())):
            return False
        self._tried[rule.slug] = paths
        return True

    def verdicts(self, record: Record) -> list[Alert]:
        """Returns the new alerts about the record observed last, with causes."""
        if self.lost is None:
            with self._guarded("history"):
                self.history.learn(record)
        alerts = []
        for rule in self.rules:
            adversarial = rule.descends and self.history.facts.objective == "adversarial"
            if rule.slug in self._off or adversarial:
                continue
            alert = None
            with self._guarded(rule.slug, rule):
                alert = self._episode(rule, rule.check(record, self.history)) if rule.can_judge(record) else None
            if alert is not None:
                with self._guarded("causes"):  # the alert goes out without them where this fails
                    alert = diagnose(alert, record, self.history)
                alerts.append(replace(alert, paths=alert.paths[:MAX_PATHS]))
        return alerts

    @contextlib.contextmanager
    def _guarded(self, name: str, rule: Rule | None = None) -> Iterator[None]:
        """What goes wrong, perhaps in a rule of a user's, is counted and said once: it must not end a training run."""
        try:
            yield
        except Exception as error:
            if name == "history" and rule is None:
                self.lost = error
            elif rule is not None and self.lost is not None:
                return  # it was asked about a past that lacks this record: that is counted already, and not its fault
            self.broken[name] = self.broken.get(name, 0) + 1
            if rule is not None:
                self._off.add(name)
            if self.broken[name] == 1:
                what = f"rule {name} failed and is switched off" if rule is not None else _FAILED[name]
                _log.warning("%s: %s: %s", what, type(error).__name__, error)

    def mark(self, step: int) -> None:
        """Takes note of an announced event: what it explains is not held against the run."""
        self.history.forget(step)

    def _episode(self, rule: Rule, found: Alert | None) -> Alert | None:
        slug = rule.slug
        episode = self._episodes.get(slug)
        if found is None:
            if episode is not None:
                episode.quiet += 1
                if episode.quiet >= QUIET_PROBES:
                    del self._episodes[slug]
                    self.history.raised.pop(slug, None)
                    self._tried.pop(slug, None)
            return None
        paths = set(found.paths)
        if episode is not None and found.level <= episode.level and (not rule.by_leaf or paths <= episode.paths):
            episode.quiet = 0
            return None
        if episode is None:
            episode = self._episodes[slug] = _Episode(found.level)
        new = tuple(p for p in found.paths if p not in episode.paths)  # first, since only the first few are shown
        episode.level, episode.quiet = max(episode.level, found.level), 0
        old = tuple(p for p in found.paths if p in episode.paths)
        episode.paths |= paths
        self.history.raised[slug] = episode.level
        self.history.said |= paths
        return replace(found, paths=new + old)
