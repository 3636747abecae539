"""The facts that explanations are judged by, gathered once an alert; and the words they are told in."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnx_probes.host.alert import Alert
from nnx_probes.host.causes.course import course
from nnx_probes.host.causes.measured import measured
from nnx_probes.host.causes.state import state
from nnx_probes.host.clock import counters
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rules.nonfinite import bad_leaves
from nnx_probes.host.trend import falls, stands, undecided

__all__ = ["gather"]

_GROWTH = 10.0
_HALF = ("float16", "float8")
_LARGEST: dict[str, float] = {
    "float16": 65504,
    "float8_e5m2": 57344,
    "float8_e5m2fnuz": 57344,
    "float8_e4m3fn": 448,
    "float8_e4m3": 240,
    "float8_e4m3fnuz": 240,
    "float8_e4m3b11fnuz": 30,
    "float8_e3m4": 15.5,
}
_LOW = ("float16", "bfloat16", "float8")
_CURVATURE = ".diff_params_memory."
"""In the path of what L-BFGS remembers: it decides what becomes of a gradient of ones, not the learning rate alone."""


def gather(alert: Alert, record: Record, history: History) -> dict[str, Any]:
    """Returns name -> truth or words, for `Explanation.needs`, ``plus``, ``minus`` and ``why``."""
    flow = measured(alert, record, history)
    found = _optimizer(alert, record, history)
    if flow["absorbed_here"] and not found["absorbed"]:
        found.update(absorbed=True, absorbed_words=f"{flow['absorbed_share']:.0%} of the elements kept their value")
    return {
        **_movement(alert, record, history),
        **found,
        **flow,
        **_losses(history),
        **_phases(record, history),
        **_vocabulary(record),
        **state(alert, record),
        **course(alert, record, history),
    }


def _movement(alert: Alert, record: Record, history: History) -> dict[str, Any]:
    motion = history.params
    still = motion.trained & ((motion.still > 0) | (~motion.moved & (motion.probes >= 2)))
    whole = bool(motion.trained.any()) and bool((still | ~motion.trained).all())
    here = set(alert.paths)
    replaced = here & set(record.get("params.replaced", ()))
    deleted = "deleted" in record.get("params.fingerprint", ())
    traced = bool(record.get("watch.traced", 0))
    dtypes = sorted({d for p, d in _rows(record, "params", "dtypes") if p in here})
    return {
        "params_still": whole or deleted,
        "some_leaves": bool(motion.moved[motion.trained].any()) and not whole,
        "replaced": bool(replaced),
        "replaced_words": "; a new object stands where the first one stood" if replaced else "",
        "deleted": deleted,
        "gone_words": "; their arrays were donated away" if deleted else "",
        "came_back": motion.returned_to is not None or (alert.values.get("step") is not None and _went_back(history)),
        "entered": bool(alert.values.get("entered")),
        "optimizer_replaced": bool(alert.values.get("other")),
        "update_traced": traced,
        "watched_untraced": history.facts.watched
        and not any(record.get(f"watch.{how}", 0) for how in ("traced", "conditional", "eager")),
        "traced_words": ", although Optimizer.update was traced into the step" if traced else "",
        "low_precision": any(d.startswith(_LOW) for d in dtypes),
        "dtype_words": ", ".join(dtypes) or "unknown dtype",
        "other_model": history.facts.other_model,
        "other_words": "; it is known to hold another model object" if history.facts.other_model else "",
    }


def _optimizer(alert: Alert, record: Record, history: History) -> dict[str, Any]:
    trial, motion = history.trial, history.optimizer
    leaves, norms = record.leaves.get("optimizer"), record.get("optimizer.norm")
    moments = np.zeros(0)
    found: dict[str, float] = {}
    moved = False
    if leaves is not None and norms is not None:
        big = np.array([len(s) > 0 for s in leaves.shapes], bool)
        moments = norms[big]
        found = counters(leaves, record.values["optimizer.value"])
        moved = bool(motion.moved[big].any()) if len(motion.moved) == len(big) else False
    here = set(alert.paths)
    rows = np.array([p in here for p, _ in _rows(record, "params", "paths")], bool)
    fits = trial is not None and len(trial.update) == len(rows) and bool(rows.any())
    zero_here = fits and trial is not None and trial.is_zero(rows)
    absorbed = float(np.mean(trial.absorbed[rows])) if fits and trial is not None else 0.0
    update = float(np.max(trial.update[rows])) if fits and trial is not None else float("nan")
    rate = found.get("learning_rate")
    zero = trial is not None and trial.zero_now
    earlier = bool(zero and trial is not None and trial.moved_earlier)
    moments_zero = len(moments) > 0 and not np.any(moments)
    memory = leaves is not None and any(_CURVATURE in f".{path}." for path in leaves.paths)
    if rate == 0:
        rate_words = "The injected learning_rate is 0."
    elif earlier:
        rate_words = (
            "A gradient of ones gives no update now, but did at an earlier schedule count: the schedule ran out."
        )
    else:
        rate_words = "A gradient of ones gives no update, now and at every schedule count tried."
    return {
        "optimizer_step": int(found["step"]) if "step" in found else "unknown",
        "accumulated": int(found.get("mini_step", 0)),
        "never_applied": found.get("gradient_step") == 0,
        "counters_moved": history.clock.ever_stepped,
        "optimizer_moved": moved,
        "moments_zero": moments_zero,
        "moments_zero_here": _moments_zero_here(alert, record),
        "gradient_maybe_zero": moments_zero or not moved or _moments_zero_here(alert, record),
        "moment_words": "its moments are exactly 0" if moments_zero else "nothing arrives",
        "selects_nothing": bool(record.get("optimizer.selects_nothing")),
        "wrt": record.get("optimizer.wrt", "?"),
        "rate_zero": rate == 0 or (zero and not memory and (earlier or rate is None)),
        "curvature_memory": memory,
        "rate_words": rate_words,
        "moved_earlier": earlier,
        "trial_zero": zero,
        "trial_zero_here": zero_here,
        "where": "every parameter" if zero else "these parameters",
        "left_out": bool(zero_here and not zero),
        "absorbed": absorbed >= 0.5,
        "absorbed_words": f"{absorbed:.0%} of the elements keep their value",
        "update_words": f"a gradient of ones would change them by {update:.1e}"
        if update == update
        else "as far as known",
        "skips": int(found.get("notfinite_count", 0)),
        "skips_ran_out": found.get("notfinite_count", 0) > 0,
    }


def _moments_zero_here(alert: Alert, record: Record) -> bool:
    """Whether the optimizer keeps moments for the alert's leaves, and all of them are exactly 0."""
    leaves, norms = record.leaves.get("optimizer"), record.get("optimizer.norm")
    if leaves is None or norms is None:
        return False
    tails = tuple(f".{path}" for path in alert.paths)
    own = [n for p, n, s in zip(leaves.paths, norms, leaves.shapes, strict=True) if s and p.endswith(tails)]
    return bool(own) and not any(own)


def _losses(history: History) -> dict[str, Any]:
    steps, losses = history.series("loss")
    down, flat = falls(losses.tolist()), stands(losses.tolist())
    drops = undecided(losses.tolist(), steps.tolist())
    words = "the loss is not known" if not len(losses) else f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g}"
    if flat:
        words = f"the loss is bit-equal at {losses[-1]:.6g}"
    elif down:
        words = f"the loss falls ({losses[0]:.4g} to {losses[-1]:.4g})"
    return {"loss_falls": down, "loss_drops": drops, "loss_stands": flat, "loss_words": words}


def _phases(record: Record, history: History) -> dict[str, Any]:
    bad = {phase: bad_leaves(record, phase, history) for phase in ("batch", "loss", "metrics", "grads", "params")}
    loss = record.get("loss")
    batch = bad["batch"]
    half = [d for _, d in _rows(record, "params", "dtypes") if d.startswith(_HALF)]
    narrow = sorted(set(half))
    growth = _growth(history)
    seen, _ = history.series("params.largest")
    unseen = bad["params"] is not None and len(seen) >= 2 and int(record.get("loop.steps", 1)) > 1
    top = _largest_integer(record)
    return {
        "batch_bad": batch is not None,
        "batch_words": f"{batch[1]} element(s) in batch leaf {batch[0][0]}" if batch else "",
        "batch_state": "finite" if "batch.nonfinite" in record else "not known",
        "batch_ints": top is not None,
        "batch_max_int": top if top is not None else "?",
        "loss_bad": bad["loss"] is not None,
        "loss_fine": loss is not None and bad["loss"] is None,
        "loss": f"{loss:.4g}" if loss is not None else "?",
        "metrics_bad": bad["metrics"] is not None,
        "params_bad": bad["params"] is not None,
        "back_bad": bad["params"] is not None or bad["grads"] is not None,
        "back_words": "its gradients are not" if bad["grads"] is not None else "the parameters after it are not",
        "params_fine": "params.nonfinite" in record and bad["params"] is None,
        "unseen": unseen,
        "unseen_words": f"steps {int(seen[-2]) + 1} to {record.step}" if unseen else "",
        "begin_words": (
            f"It began somewhere in steps {int(seen[-2]) + 1} to {record.step}, and only the last of them was probed."
            if unseen
            else "The loss is the first thing that is not finite."
        ),
        "grew": bool(growth),
        "growth_words": growth,
        "half": bool(half),
        "half_words": f"{len(half)}",
        "half_types": ", ".join(narrow),
        "half_largest": ", ".join(f"{d}: {_LARGEST[d]:g}" if d in _LARGEST else d for d in narrow),
    }


def _vocabulary(record: Record) -> dict[str, Any]:
    """Whether the batch holds an integer that no embedding has a row for."""
    top = _largest_integer(record)
    sizes = [
        (shape[0], path)
        for path, shape in _rows(record, "params", "shapes")
        if path.rpartition(".")[2] == "embedding" and len(shape) == 2
    ]
    if top is None or not sizes:
        return {"token_beyond": False, "token_words": ""}
    rows, path = max(sizes)
    return {"token_beyond": top >= rows, "token_words": f"the largest embedding, {path}, has {rows} rows"}


def _largest_integer(record: Record) -> int | None:
    """The largest integer of the batch; None where it is not known, or could not be read."""
    top = record.get("batch.max_int")
    return int(top) if top is not None and np.isfinite(top) else None


def _growth(history: History) -> str:
    """What grew tenfold before things broke, in words; empty when nothing did."""
    for name, words in (("loss", "the loss"), ("params.largest", "the largest parameter")):
        _, values = history.series(name)
        values = np.abs(values[np.isfinite(values)])
        half = len(values) // 2
        if not half:
            continue
        early, late = float(np.median(values[: min(half, 4)])), float(values[half:].max())
        if late >= _GROWTH * max(early, 1e-12):
            return f"{words} grew from {early:.3g} to {late:.3g}"
    return ""


def _went_back(history: History) -> bool:
    _, steps = history.series("optimizer.step")
    return len(steps) >= 2 and steps[-1] < steps[-2]


def _rows(record: Record, group: str, field: str) -> list[tuple[str, Any]]:
    leaves = record.leaves.get(group)
    return [] if leaves is None else list(zip(leaves.paths, getattr(leaves, field), strict=True))
