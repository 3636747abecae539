"""NaN or Inf anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.errors import ArgumentError, closest
from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.clock import counters
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["PHASES", "Nonfinite", "bad_leaves", "poisoned"]

PHASES = ("batch", "loss", "metrics", "eval", "grads", "updates", "params", "optimizer")
"""The order in which a bad number travels through a training step."""

_WORDS = {
    "batch": "the batch",
    "loss": "the loss",
    "metrics": "a metric",
    "eval": "the evaluation",
    "grads": "the gradients",
    "updates": "the updates",
    "params": "the parameters",
    "optimizer": "the optimizer state",
}


@dataclass(frozen=True)
class Nonfinite(Rule):
    """Any NaN or Inf in batch, loss, metrics, evaluation, gradients, updates, parameters or optimizer state.

    Fires at the first probe that sees one, from step 0 on, without patience. Says the first phase in that order and the first
    leaf. ERROR; WARN when only a side metric or an evaluation is affected, INFO when only gradients are and the optimizer
    skipped the step on purpose (``optax.apply_if_finite``). Constants do not count (`History.constants`): leaves that are not
    trained, and single numbers of the optimizer, that were not finite at the first probe and have not changed since.

    Args:
      allow: phases in which non-finite values are expected, for example ``("loss",)`` for a CTC loss.
    """

    allow: tuple[str, ...] = ()

    slug = "nonfinite"
    reads = ()

    def __post_init__(self) -> None:
        for phase in self.allow:
            if phase not in PHASES:
                raise ArgumentError(
                    f"allow={self.allow!r}: {phase!r} is not a phase, expected some of {PHASES}.{closest(phase, PHASES)}"
                )

    def check(self, record: Record, history: History) -> Alert | None:
        bad = {p: found for p in PHASES if p not in self.allow and (found := bad_leaves(record, p, history))}
        if not bad:
            return None
        first = next(iter(bad))
        paths, count, size = bad[first]
        kind = "NaN or Inf"
        level = Level.WARN if set(bad) <= {"metrics", "eval"} else Level.ERROR
        if first == "grads" and set(bad) <= {"grads", "updates"} and _skipped(record):
            level = Level.INFO
        message = f"{_WORDS[first].capitalize()} held {count} non-finite element{'s' * (count != 1)}"
        message += f" in {len(paths)} of {size} leaves, first in {paths[0]}." if first != "loss" else "."
        later = [_WORDS[p] for p in bad if p != first]
        if later:
            message += f" At the same step also: {', '.join(later)}."
        fine = [
            _WORDS[p]
            for p in PHASES
            if p not in bad and p != "metrics" and _measured(record, p) and _all_finite(record, p)
        ]
        if fine:
            message += f" Finite at that step: {', '.join(fine)}."
        return Alert(
            record.step,
            self.slug,
            level,
            f"{kind} in {_WORDS[first]}",
            message,
            tuple(f"{first}.{p}" if first in ("batch", "metrics", "eval") else p for p in paths)
            if first != "loss"
            else (),
            values={f"{p}.nonfinite": float(bad[p][1]) for p in bad},
        )


def bad_leaves(record: Record, phase: str, history: History) -> tuple[list[str], int, int] | None:
    """Returns (affected paths, non-finite elements, leaves measured) of a phase, or None if it is finite but for constants."""
    if phase == "loss":
        value = record.get("loss")
        return None if value is None or np.isfinite(value) else (["loss"], 1, 1)
    if phase == "eval":
        names = [name for name in record.values if name.startswith("eval.") and _is_number(record.values[name])]
        odd = [name.removeprefix("eval.") for name in names if not np.isfinite(record.values[name])]
        return (odd, len(odd), len(names)) if odd else None
    if _all_finite(record, phase):
        return None
    paths, meant = record.leaves[_group(phase)].paths, history.constants.paths(phase)
    counts = record.values[f"{_group(phase)}.nonfinite"]
    bad = [(p, int(c)) for p, c in zip(paths, counts, strict=True) if c and p not in meant]
    return ([p for p, _ in bad], sum(c for _, c in bad), len(paths)) if bad else None


def poisoned(record: Record) -> bool:
    """Whether loss, gradients or trained parameters are not finite: what else they then show is a consequence."""
    loss, grads, params = record.get("loss", 0.0), record.get("grads.nonfinite"), record.get("params.nonfinite")
    if not np.isfinite(loss) or np.any(grads if grads is not None else 0):
        return True
    return params is not None and bool(np.any(params[np.array(record.leaves["params"].trained, bool)]))


def _skipped(record: Record) -> bool:
    leaves, values = record.leaves.get("optimizer"), record.get("optimizer.value")
    return leaves is not None and values is not None and counters(leaves, values).get("last_finite", 1.0) == 0


def _group(phase: str) -> str:
    """Where a phase's counts are: ``metrics.<name>`` are the user's names, and one may be ``nonfinite``."""
    return "metric_arrays" if phase == "metrics" else phase


def _is_number(value: object) -> bool:
    return isinstance(value, (float, np.floating)) or (isinstance(value, np.ndarray) and value.shape == ())


def _measured(record: Record, phase: str) -> bool:
    return phase in record if phase == "loss" else f"{_group(phase)}.nonfinite" in record


def _all_finite(record: Record, phase: str) -> bool:
    """Whether nothing that was measured of a phase's leaves is bad, constants included."""
    counts = record.get(f"{_group(phase)}.nonfinite")
    return counts is None or not np.any(counts)
