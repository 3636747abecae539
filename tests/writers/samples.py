"""Records and alerts that several tests use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nnx_probes.host.alert import Alert, Cause, Level
from nnx_probes.host.record import Leaves, Record

PARAMS = Leaves(
    group="params",
    paths=("layers.0.kernel", "layers.0.bias"),
    kinds=("Param", "Param"),
    shapes=((2, 3), (3,)),
    dtypes=("float32", "float32"),
    trained=(True, True),
)


def record(step: int, leaves: Leaves = PARAMS, **values: Any) -> Record:
    """A record with a loss and three values a leaf; ``params__norm=`` stands for ``params.norm``."""
    n = len(leaves)
    found: dict[str, Any] = {
        "loss": 1.0 / (step + 1),
        "params.norm": np.arange(1, n + 1, dtype=np.float32),
        "params.max_abs": np.full(n, 0.5, np.float32),
        "params.nonfinite": np.zeros(n, np.int32),
        "params.fingerprint": tuple(f"mix64:{step:08x}{i:08x}" for i in range(n)),
        "optimizer.step": step,
    }
    found |= {name.replace("__", "."): value for name, value in values.items()}
    return Record(step, 1_700_000_000.0 + step, found, {"params": leaves})


def alert(step: int = 30, rule: str = "frozen_params", **changes: Any) -> Alert:
    """An alert with two causes."""
    fields: dict[str, Any] = {
        "level": Level.ERROR,
        "title": "No parameter changes",
        "message": "2 of 2 leaves are bit-equal over 2 updates.",
        "paths": ("layers.0.kernel", "layers.0.bias"),
        "causes": (
            Cause(
                "jit_copies",
                "The step is compiled with jax.jit",
                "optimizer.step stays at 0",
                "Use nnx.jit",
                0.9,
                "optimizer.step rises",
            ),
            Cause("zero_rate", "The learning rate is 0", "", "Check the schedule"),
        ),
        "values": {"leaves": 2.0},
    }
    return Alert(step=step, rule=rule, **(fields | changes))


def same_record(a: Record, b: Record) -> bool:
    """Whether two records are equal, arrays bit for bit (a NaN equals a NaN)."""
    if (a.step, a.leaves) != (b.step, b.leaves) or not same_value(a.time_s, b.time_s):
        return False
    return a.values.keys() == b.values.keys() and all(same_value(v, b.values[k]) for k, v in a.values.items())


def same_value(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        if not isinstance(b, np.ndarray) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if a.dtype.kind != "f":
            return bool((a == b).all())
        nan = np.isnan(a)
        return bool((nan == np.isnan(b)).all()) and a[~nan].tobytes() == b[~nan].tobytes()
    if isinstance(a, float):
        return type(b) is float and (a.hex() == b.hex())  # tells -0.0 from 0.0, and NaN equals NaN
    return type(a) is type(b) and bool(a == b)


def accumulate(folder: Path) -> Any:
    """TensorBoard's own reader over all event files of a folder."""
    from tensorboard.backend.event_processing import event_accumulator

    keep_all = {"scalars": 0, "tensors": 0, "histograms": 0, "images": 0}
    return event_accumulator.EventAccumulator(str(folder), size_guidance=keep_all).Reload()


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulate(folder).Scalars(tag)]


def texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    events = accumulate(folder).Tensors(tag)
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events]
