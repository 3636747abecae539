"""Puts the rules to each record: once an episode, guarded, explained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
      broken: slug of each rule that raised -> how often. A broken rule is left out from then on.
    """

    def __init__(self, rules: Sequence[Rule], facts: Facts | None = None) -> None:
        self.rules = tuple(rules)
        self.history = History(facts or Facts())
        self.broken: dict[str, int] = {}
        self._episodes: dict[str, _Episode] = {}
        self._tried: dict[str, set[str]] = {}

    def observe(self, record: Record) -> bool:
        """Takes in a record. Returns whether a trial of the optimizer would help to judge it."""
        self.history.observe(record)
        if "params.fingerprint" not in record:
            return False
        return any([self._asks(rule, record) for rule in self.rules if isinstance(rule, FrozenParams)])

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
        self.history.learn(record)
        alerts = []
        for rule in self.rules:
            adversarial = rule.descends and self.history.facts.objective == "adversarial"
            if rule.slug in self.broken or adversarial or not rule.can_judge(record):
                continue
            try:
                found = rule.check(record, self.history)
                alert = self._episode(rule, found)
                if alert is not None:
                    alert = diagnose(alert, record, self.history)
                    alerts.append(replace(alert, paths=alert.paths[:MAX_PATHS]))
            except Exception as error:  # a rule, perhaps a user's: it must not end a training run
                self.broken[rule.slug] = self.broken.get(rule.slug, 0) + 1
                _log.warning("rule %s failed and is switched off: %s: %s", rule.slug, type(error).__name__, error)
        return alerts

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
