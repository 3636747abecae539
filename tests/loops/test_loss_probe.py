"""Loss and metrics as loops hand them over: under any name, with any key, of any type."""

from __future__ import annotations

import collections
import enum
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest
from rig import compiled_once, nothing_fails_inside  # noqa: F401

import nnx_probes as probes
from nnx_probes.writers import MemoryWriter

LOSS = jnp.float32(0.5)
NAN = float("nan")


class Split(enum.Enum):
    TRAIN = 1


Pair = collections.namedtuple("Pair", "x y")


def probed(**handed):
    """Returns (what was recorded of loss and metrics, alerts) of one step."""
    writer = MemoryWriter()
    with probes.Monitor(writer, every=1) as monitor:
        monitor(0, **handed)
    assert monitor.failures == {}
    values = {n: v for n, v in writer.records[0].values.items() if n.startswith(("loss", "metric"))}
    return values, monitor.alerts


def of_metrics(metrics):
    values, _ = probed(loss=LOSS, metrics=metrics)
    assert values.pop("loss") == 0.5
    values.pop("metric_arrays.nonfinite", None)
    return values


@pytest.mark.parametrize("name", ["nonfinite", "norm", "max_abs", "fingerprint", "value"])
@pytest.mark.parametrize("value", [7.0, jnp.float32(7)])
def test_a_metric_may_have_any_name(name, value):
    assert of_metrics({name: value, "accuracy": 0.25}) == {f"metrics.{name}": 7.0, "metrics.accuracy": 0.25}


def test_nothing_else_is_put_beside_the_metrics():
    values, _ = probed(loss=LOSS, metrics={"accuracy": 0.25, "per_class": jnp.array([1.0, NAN])})
    assert values.pop("metric_arrays.nonfinite").tolist() == [0, 1]
    assert values == {"loss": 0.5, "metrics.accuracy": 0.25}


@pytest.mark.parametrize("name", ["nonfinite", "accuracy"])
def test_a_metric_that_is_not_finite_is_told_under_its_name(name):
    _, (alert,) = probed(loss=LOSS, metrics={name: jnp.float32(NAN), "other": 1.0, "many": jnp.ones(3)})
    assert (alert.rule, alert.level.name, alert.paths) == ("nonfinite", "WARN", (f"metrics.{name}",))


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({1: LOSS, "x": 2.0}, {"1": 0.5, "x": 2.0}),
        ({1: LOSS, "1": 2.0}, {"1": 0.5, "1#2": 2.0}),
        ({None: LOSS, "x": 2.0, 3: 4.0}, {"None": 0.5, "x": 2.0, "3": 4.0}),
        ({Split.TRAIN: LOSS, "x": 2.0}, {"'Split.TRAIN'": 0.5, "x": 2.0}),
        ({"train": {1: LOSS, "x": 2.0}}, {"train.1": 0.5, "train.x": 2.0}),
        ({"train": [LOSS, {1: 2.0, "x": 3.0}]}, {"train.0": 0.5, "train.1.1": 2.0, "train.1.x": 3.0}),
        ({"train": Pair(LOSS, 2.0)}, {"train.x": 0.5, "train.y": 2.0}),
        (types.MappingProxyType({"x": LOSS}), {"x": 0.5}),
        ({"x": LOSS, "name": "run", "none": None}, {"x": 0.5}),
    ],
)
def test_metrics_are_read_whatever_their_keys(metrics, found):
    assert of_metrics(metrics) == {f"metrics.{name}": value for name, value in found.items()}


@pytest.mark.parametrize("make", [np.complex64, jnp.complex64, complex])
def test_of_a_complex_loss_the_real_part_is_taken_where_it_is_all(make):
    assert probed(loss=make(0.25)) == ({"loss": 0.25}, ())
    values, alerts = probed(loss=make(0.25 + 1j))
    assert values == {} and alerts == ()


@pytest.mark.parametrize("bad", [complex(NAN, 0), complex(0, NAN), complex(math.inf, 0)])
def test_a_complex_loss_that_is_not_finite_is_told(bad):
    _, (alert,) = probed(loss=jnp.complex64(bad))
    assert (alert.rule, alert.level.name) == ("nonfinite", "ERROR")


def test_several_complex_losses_are_counted():
    values, _ = probed(loss=jnp.ones((2, 3), jnp.complex64))
    assert values == {"loss.size": 6}
