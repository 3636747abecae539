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
    if "step" in scalars:
        values["optimizer.step"] = float(scalars["step"])
    return table, values


def run(records, facts=None, rules=None):
    """Puts records through a judge; returns (alerts, judge)."""
    judge = Judge(default() if rules is None else rules, facts or Facts())
    alerts = []
    for record in records:
        judge.observe(record)
        alerts += judge.verdicts(record)
    return alerts, judge
