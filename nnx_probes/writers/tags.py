"""What viewers show of a record or an alert: pure functions from one to tagged numbers and texts.

TensorBoard groups charts by the text before the first ``/`` and keeps tags otherwise as they are, so
that first ``/`` is the only one placed on purpose, and no character of a name is ever replaced by
another: two names stay two tags.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nnx_probes.errors import ArgumentTypeError
from nnx_probes.host.record import Record
from nnx_probes.writers.markdown import alert_markdown, alert_table, code, table

__all__ = [
    "alert_markdown",
    "alert_table",
    "fingerprint_tables",
    "leaf_scalars",
    "number",
    "safe_tag",
    "scalars",
    "vectors",
]

_HASH_LENGTH = 8
"""Hex digits of a leaf list's hash in a tag: two lists of one run differ for certain in practice."""


def number(value: Any, name: str = "value") -> float:
    """Returns a float for one number: Python, NumPy, or a one-element array of any library.

    Raises:
      ArgumentTypeError: `value` is not one number.
    """
    try:
        return float(value) if isinstance(value, (bool, int, float)) else float(np.asarray(value).item())
    except OverflowError:  # an int above 1e308
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{name!r} cannot be written as a scalar: got {type(value).__name__} {value!r:.80}, expected one "
            "number. Reduce it first (for example with .mean()), or use write_summaries or write_histograms."
        ) from error


def safe_tag(name: str) -> str:
    """Returns `name`, changed only where a protocol buffer cannot hold it (lone surrogates)."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
        return f"{name.encode('utf-8', 'backslashreplace').decode('utf-8')}#{mark}"
    return name


def _tag(name: str) -> str:
    return safe_tag(name.replace(".", "/", 1))


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float)):
        return True
    return isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 and _is_numeric(value)


def _is_numeric(value: Any) -> bool:
    # ml_dtypes (bfloat16, float8, int4) have kind "V" and convert to float32.
    return value.dtype.kind in "biuf" or (value.dtype.kind == "V" and value.dtype.names is None)


def _is_per_leaf(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and _is_numeric(value)


def _norm(values: np.ndarray) -> float:
    """The L2 norm of per-leaf norms, scaled by the largest so that no square overflows."""
    largest = _max_abs(values)
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(float(np.sum((_as(np.float64, values) / largest) ** 2)))


def _max_abs(values: np.ndarray) -> float:
    return float(np.max(np.abs(_as(np.float64, values)))) if values.size else 0.0


def _as(dtype: type[np.floating[Any]], values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # invalid: a signalling NaN
        return values.astype(dtype)


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else math.nan


_OVER_LEAVES: Mapping[str, Callable[[np.ndarray], float]] = {
    "norm": _norm,
    "max_abs": _max_abs,
    "ratio": _median,
    "absorbed": _mean,
    "zeros": _mean,
    "dead": _mean,
}
"""Statistic per leaf -> what stands for all leaves."""


def scalars(record: Record) -> dict[str, float]:
    """Returns the record's numbers, and the aggregates of its per-leaf values, by tag.

    The tag is the dotted name with its first dot replaced by ``/``. Per-leaf values give
    ``<group>/norm`` (root of the sum of squares over the leaves, in float64), ``<group>/max_abs``, the median of
    ``<group>/ratio`` and the means of ``<group>/absorbed``, ``<group>/zeros`` and ``<group>/dead``.
    ``nonfinite`` counts all non-finite elements and all non-finite numbers: a chart of NaN is a gap, a
    chart of counts is not. Texts, fingerprints and other per-leaf values are left out.

    Cost: one pass over float[n_leaves] per statistic.
    """
    found: dict[str, float] = {}
    bad = 0.0
    seen_float = False
    for name, value in record.values.items():
        statistic = name.rpartition(".")[2]
        if _is_number(value):
            shown = number(value, name)
            seen_float = True
            bad += shown if statistic == "nonfinite" else not math.isfinite(shown)
            if name == "nonfinite":
                continue
        elif not _is_per_leaf(value):
            continue
        else:
            seen_float = True
            if statistic == "nonfinite":
                bad += float(_as(np.float64, value).sum())
                continue
            if statistic not in _OVER_LEAVES:
                continue
            shown = _OVER_LEAVES[statistic](value)
            if math.isnan(shown) and statistic not in ("norm", "max_abs"):
                continue  # not measured, which is no finding
        tag = _tag(name)
        found[f"{tag}#{_hash((name,))}" if tag in found else tag] = shown
    if seen_float:
        found["nonfinite"] = bad
    return found


def _prefix(name: str) -> str:
    """``"params.norm"`` -> ``"params_norm"``, a chart group of its own."""
    return name.replace(".", "_")


def vectors(record: Record) -> dict[str, np.ndarray]:
    """Returns each per-leaf value as float32[n_leaves] under ``<group>_<statistic>/<hash of the leaves>``.

    A viewer keeps the first description of a tag. The hash gives another list of leaves another tag.
    """
    found = {}
    for name, value in record.values.items():
        if _is_per_leaf(value):
            group = name.rpartition(".")[0]
            leaves = record.leaves.get(group)
            paths = leaves.paths if leaves is not None else (f"{len(value)} leaves",)
            found[f"{safe_tag(_prefix(name))}/{_hash(paths)}"] = _as(np.float32, value)
    return found


def _hash(paths: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        raw = path.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:_HASH_LENGTH]


def leaf_scalars(record: Record, accept: Callable[[str], bool]) -> dict[str, float]:
    """Returns ``<group>_<statistic>/<leaf path>`` for each leaf whose path `accept` takes.

    Cost: a viewer needs about 350 bytes of memory a point; 3000 leaves over 1000 steps are 1 GB.
    """
    found: dict[str, float] = {}
    for name, value in record.values.items():
        leaves = record.leaves.get(name.rpartition(".")[0])
        if not _is_per_leaf(value) or leaves is None or len(leaves) != len(value):
            continue
        prefix = _prefix(name)
        for path, leaf in zip(leaves.paths, value, strict=True):
            if accept(path):
                found[safe_tag(f"{prefix}/{path}")] = float(leaf)
    return found


def fingerprint_tables(record: Record) -> dict[str, str]:
    """Returns one Markdown table of leaves and fingerprints for each group that has them."""
    found = {}
    for name, value in record.values.items():
        group, _, statistic = name.rpartition(".")
        leaves = record.leaves.get(group)
        if statistic == "fingerprint" and leaves is not None and len(leaves) == len(value):
            rows = [(code(path), code(mark)) for path, mark in zip(leaves.paths, value, strict=True)]
            found[f"fingerprints/{safe_tag(group)}"] = table(("leaf", "fingerprint"), rows) + "\n"
    return found
