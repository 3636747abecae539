"""Records by hand, so that rules can be tested without a device."""

from __future__ import annotations

import numpy as np

from nnx_probes.host.history import Facts
from nnx_probes.host.judge import Judge
from nnx_probes.host.record import Leaves, Record
from nnx_probes.host.rules import default


def leaves(group="params", paths=("a", "b"), trained=None, shapes=None, dtypes=None, kinds=None):
    n = len(paths)
    return Leaves(
        group,
        tuple(paths),
        tuple(kinds or ("Param",) * n),
        tuple(shapes or ((2, 2),) * n),
        tuple(dtypes or ("float32",) * n),
        tuple((True,) * n if trained is None else trained),
    )


PARAMS = leaves()


def params(step, texts, *, table=PARAMS, nonfinite=None, loss=None, opt=None, steps=1, **extra):
    """A record of parameters with these fingerprints (one word a leaf), and what else is given."""
    n = len(table.paths)
    values = {
        "params.fingerprint": tuple(t if ":" in t or t == "deleted" else f"xxh3:{t}" for t in texts),
        "params.norm": np.ones(n, np.float32),
        "params.max_abs": np.ones(n, np.float32),
        "params.nonfinite": np.zeros(n, np.int32) if nonfinite is None else np.array(nonfinite, np.int32),
        "loop.steps": steps,
        **extra,
    }
    tables = {"params": table}
    if loss is not None:
        values["loss"] = float(loss)
    if opt is not None:
        tables["optimizer"], more = optimizer(**opt)
        values.update(more)
    return Record(step, 0.0, values, tables)


def optimizer(moments="m", zero=False, **scalars):
    """An optimizer group: one moment leaf with this fingerprint, and scalar leaves by path."""
    paths = ("mu.a", *scalars)
    table = leaves(
        "optimizer",
        paths,
        trained=(False,) * len(paths),
        shapes=((2, 2),) + ((),) * len(scalars),
        kinds=("OptVariable",) + ("OptArray",) * len(scalars),
    )
    values = {
        "optimizer.fingerprint": (f"xxh3:{moments}", *(f"xxh3:{v}" for v in scalars.values())),
        "optimizer.norm": np.array([0.0 if zero else 1.0, *scalars.values()], np.float32),
        "optimizer.nonfinite": np.zeros(len(paths), np.int32),
        "optimizer.value": np.array([np.nan, *scalars.values()], np.float64),
    }
    for name in ("step", "learning_rate", "notfinite_count", "total_notfinite"):
        if name in scalars:
            values[f"optimizer.{name}"] = float(scalars[name])
    return table, values


def micro(step, k, offset=0):
    """The counters of ``optax.MultiSteps`` with `k` micro-steps after the call of index `step`."""
    calls = step + 1 + offset
    return dict(step=calls, mini_step=calls % k, gradient_step=calls // k, moments=f"m{step}")


def flow(
    step,
    *,
    table=PARAMS,
    grads=1.0,
    updates=1e-3,
    ratio=None,
    absorbed=0.0,
    cosine=None,
    grads_bad=0,
    updates_bad=0,
    slices=None,
    activations=None,
    texts=None,
    opt=None,
    **more,
):
    """A record with measured gradients and updates of a run in which all moves, unless told otherwise.

    Args:
      step, table, more: as in `params`; parameters are all 1, so an update's `ratio` is its magnitude.
      grads, updates: magnitude of every element, one number a leaf or one for all; None leaves the group out.
      ratio, absorbed, grads_bad, updates_bad: likewise; `cosine` (between gradient and update) where given.
      slices: keywords of `stack`.
      activations: keywords of `places`.
      texts: fingerprints, new ones by default.
      opt: keywords of `optimizer`; an advancing one by default, False for none.
    """
    opt = dict(step=step + 1, moments=f"m{step}") if opt is None else opt or None
    base = params(step, [f"s{step}"] * len(table) if texts is None else texts, table=table, opt=opt, **more)
    values, tables = {}, {}
    rows = [i for i, trained in enumerate(table.trained) if trained]
    n, roots = len(rows), np.sqrt([max(np.prod(table.shapes[i]), 1) for i in rows])
    for group, size, bad in (("grads", grads, grads_bad), ("updates", updates, updates_bad)):
        if size is not None:
            tables[group] = leaves(group, *([getattr(table, f)[i] for i in rows] for f in _FIELDS))
            values[f"{group}.max_abs"] = _row(size, n)
            values[f"{group}.norm"] = (_row(size, n) * roots).astype(np.float32)
            values[f"{group}.nonfinite"] = _row(bad, n, np.int32)
    if updates is not None:
        values["updates.ratio"] = _row(updates if ratio is None else ratio, n)
        values["updates.absorbed"] = _row(absorbed, n)
        values.update({} if cosine is None else {"updates.cosine": _row(cosine, n)})
    for group, given, build in (("slices", slices, stack), ("activations", activations, places)):
        if given is not None:
            tables[group], found = build(**given)
            values.update(found)
    return Record(step, 0.0, {**values, **base.values}, {**base.leaves, **tables})


_FIELDS = ("paths", "trained", "shapes", "dtypes", "kinds")


def stack(of="stack.kernel", grads=(1.0, 1.0, 1.0), updates=1e-3, ratio=None, absorbed=0.0, shape=(2, 2)):
    """The layers of one stacked leaf: ``stack.kernel[0]``, ``stack.kernel[1]`` …"""
    n = len(grads)
    table = leaves("slices", [f"{of}[{i}]" for i in range(n)], shapes=(shape,) * n)
    root = np.sqrt(np.prod(shape))
    return table, {
        "slices.grads_max_abs": _row(grads, n),
        "slices.grads_norm": (_row(grads, n) * root).astype(np.float32),
        "slices.grads_nonfinite": np.zeros(n, np.int32),
        "slices.updates_max_abs": _row(updates, n),
        "slices.updates_norm": (_row(updates, n) * root).astype(np.float32),
        "slices.updates_ratio": _row(updates if ratio is None else ratio, n),
        "slices.updates_absorbed": _row(absorbed, n),
    }


def places(paths=("lin", "lin > relu"), dead=0.0, saturated=0.0, nonfinite=0, window=64, before=True):
    """What an `ActivationProbe` saw at these places of the model."""
    n = len(paths)
    table = leaves("activations", paths, trained=(False,) * n, shapes=((8, 4),) * n, kinds=("output",) * n)
    return table, {
        "activations.dead": _row(dead, n),
        "activations.saturated": _row(saturated, n),
        "activations.nonfinite": _row(nonfinite, n, np.int32),
        "activations.window": window,
        "activations.before": before,
    }


def numbers(step, *, loss=None, grads=None, updates=None):
    """A record of the loss and of one leaf's gradient and update norm only: cheap enough for thousands."""
    values = {} if loss is None else {"loss": float(loss)}
    norms = {group: norm for group, norm in (("grads", grads), ("updates", updates)) if norm is not None}
    values.update({f"{group}.norm": np.array([norm], np.float32) for group, norm in norms.items()})
    return Record(step, 0.0, values, {group: _ONE_LEAF for group in norms})


_ONE_LEAF = leaves(paths=("w",))


def _row(value, n, dtype=np.float32):
    return np.broadcast_to(np.asarray(value, dtype), (n,)).copy()


def run(records, facts=None, rules=None):
    """Puts records through a judge; returns (alerts, judge)."""
    judge = Judge(default() if rules is None else rules, facts or Facts())
    alerts = []
    for record in records:
        judge.observe(record)
        alerts += judge.verdicts(record)
    return alerts, judge
