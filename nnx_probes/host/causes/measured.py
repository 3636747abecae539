"""What measured gradients, updates and activations say about an alert's leaves."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnx_probes.host.alert import Alert
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rules.nonfinite import bad_leaves
from nnx_probes.host.trend import converged

__all__ = ["measured"]

_MOST = 0.5
_DEAD = 0.9
_SMALL_GAIN = 0.3
_ZERO_AT_FIRST = ("bias", "lora_b")
"""Leaves that start at 0 by design, also where they have several axes, as the biases of attention heads do."""
_UPHILL = 0.3
"""Cosine between gradient and update; descent is -1 for SGD and about -0.3 to -0.8 for Adam, momentum may turn it for a step."""


def measured(alert: Alert, record: Record, history: History) -> dict[str, Any]:
    """Returns name -> truth or words; all false where nothing was measured."""
    grads = _here(alert, record, "grads.max_abs", "slices.grads_max_abs")
    updates = _here(alert, record, "updates.max_abs", "slices.updates_max_abs")
    absorbed = _here(alert, record, "updates.absorbed", "slices.updates_absorbed")
    norms = _here(alert, record, "grads.norm", "slices.grads_norm")
    share = float(np.mean(absorbed)) if len(absorbed) and not np.isnan(absorbed).any() else 0.0
    inside = _first_bad_module(record)
    if not record.get("activations.before", False) and bad_leaves(record, "params", history) is not None:
        inside = None  # measured on parameters that were NaN already
    return {
        "grads_zero_here": bool(len(grads)) and not np.any(grads),
        "decay_only": _all_zero(record) and bool(history.params.moved[history.params.trained].any()),
        "grads_nonzero_here": bool(len(grads)) and bool(np.all(grads > 0)),
        "grad_norm_here": f"{float(np.sqrt(np.sum(norms.astype(np.float64) ** 2))):.2g}" if len(norms) else "?",
        "updates_zero_here": bool(len(updates)) and not np.any(updates),
        "updates_nonzero_here": bool(len(updates)) and bool(np.all(updates > 0)),
        "absorbed_here": share >= _MOST,
        "absorbed_share": share,
        "grads_known": "grads.norm" in record,
        "dead_inputs": _dead_inputs(alert, record),
        "dead_measured": bool(np.any(record.get("activations.dead", np.zeros(0)) >= _DEAD)),
        "saturated_measured": bool(np.any(record.get("activations.saturated", np.zeros(0)) >= _DEAD)),
        **_zero_weights(record),
        "small_weights": _small_weights(record),
        "activations_bad": inside is not None,
        "module_words": f"; the first module whose output is not finite is {inside}." if inside else "",
        "converged": converged(history),
        **_uphill(history),
        "large": bool(alert.values.get("large")),
        "clip_known": "grads.clip_norm" in record,
        **_spread(record),
    }


def _here(alert: Alert, record: Record, name: str, sliced: str) -> np.ndarray:
    """The values of the alert's own leaves (and layers); all leaves where the alert names none."""
    wanted = set(alert.paths)
    found: list[float] = []
    for value_name in (name, sliced):
        values, table = record.get(value_name), record.leaves.get(value_name.partition(".")[0])
        if values is not None and table is not None:
            pairs = zip(table.paths, values, strict=True)
            found += [float(v) for p, v in pairs if p in wanted or (not wanted and value_name == name)]
    return np.array(found, np.float64)


def _all_zero(record: Record) -> bool:
    largest = record.get("grads.max_abs")
    return largest is not None and len(largest) > 0 and not np.any(largest)


def _dead_inputs(alert: Alert, record: Record) -> bool:
    """Whether a layer's weights get no gradient while its bias does: then everything that enters the layer is 0."""
    table, largest = record.leaves.get("grads"), record.get("grads.max_abs")
    if table is None or largest is None:
        return False
    rows = list(zip(table.paths, table.shapes, largest, strict=True))
    alive = {path.rpartition(".")[0] for path, shape, top in rows if top > 0 and len(shape) == 1}
    zero = {path for path, shape, top in rows if top == 0 and len(shape) >= 2 and "." in path}
    return any(path.rpartition(".")[0] in alive for path in zero & set(alert.paths))


def _first_bad_module(record: Record) -> str | None:
    table, counts = record.leaves.get("activations"), record.get("activations.nonfinite")
    if table is None or counts is None or not np.any(counts):
        return None
    return next(path for path, count in zip(table.paths, counts, strict=True) if count)


def _uphill(history: History) -> dict[str, Any]:
    """Whether an update goes along its gradient instead of against it."""
    cosines, table = history.windows.last_finite("updates.cosine"), history.windows.leaves.get("updates")
    if cosines is None or table is None or len(cosines) != len(table):
        return {"uphill": False, "uphill_words": ""}
    matrix = np.array([len(shape) >= 2 for shape in table.shapes], bool)
    rows = matrix & (np.nan_to_num(cosines) > _UPHILL)
    first = next((path for path, row in zip(table.paths, rows, strict=True) if row), "")
    words = f"the updates of {int(rows.sum())} of {int(matrix.sum())} matrices go along their gradient, first {first}"
    return {"uphill": bool(rows.any()) and rows.sum() >= matrix.sum() / 3, "uphill_words": words}


def _small_weights(record: Record) -> bool:
    """Whether most matrices are far below the usual scale of one over the root of their fan-in."""
    table, norms = record.leaves.get("params"), record.get("params.norm")
    if table is None or norms is None:
        return False
    gains = [
        float(norm) / np.sqrt(shape[-1])  # root mean square times root of the fan-in
        for norm, shape, trained in zip(norms, table.shapes, table.trained, strict=True)
        if trained and len(shape) >= 2 and shape[-1] and np.isfinite(norm)
    ]
    return bool(gains) and float(np.median(gains)) < _SMALL_GAIN


def _zero_weights(record: Record) -> dict[str, Any]:
    """Whether trained matrices that are exactly 0 explain gradients of 0.

    One may be meant, as the last layer of a branch is. Where every gradient is 0, zero weights are the reason only if
    there is no other kind: behind a layer of zeros the last bias still gets a gradient.
    """
    table, largest = record.leaves.get("params"), record.get("params.max_abs")
    if table is None or largest is None:
        return {"weights_zero": False, "zero_words": ""}
    matrices = [
        (path, top)
        for path, top, shape, trained in zip(table.paths, largest, table.shapes, table.trained, strict=True)
        if trained and len(shape) >= 2 and not any(word in path.rpartition(".")[2] for word in _ZERO_AT_FIRST)
    ]
    rows = [path for path, top in matrices if top == 0]
    words = f"{len(rows)} matrices hold nothing but zeros, first {rows[0]}." if rows else ""
    enough = len(rows) >= 2 and (len(rows) == len(matrices) or not _all_zero(record))
    return {"weights_zero": enough, "zero_words": words}


def _spread(record: Record) -> dict[str, Any]:
    counts, updates = record.get("grads.nonfinite"), record.get("updates.max_abs")
    nothing = {"grads_bad": False, "grads_fine": counts is not None, "spread": False}
    if counts is None or not np.any(counts):
        return nothing
    clean = counts == 0
    found = {"grads_bad": True, "grads_fine": False, "spread": False, "grad_leaves": len(counts)}
    if updates is None or len(updates) != len(counts) or not clean.any():
        return found
    others = updates[clean]
    poisoned = not np.isfinite(others).any()
    words = "not finite either" if poisoned else "0"
    spread = poisoned or not np.any(others)
    return {**found, "spread": spread, "spread_words": words, "bad_grad_leaves": int((~clean).sum())}
