"""What is counted of a batch's integers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import compiled_once, nothing_fails_inside  # noqa: F401

import nnx_probes as probes
from nnx_probes.callbacks import LabelProbe
from nnx_probes.writers import MemoryWriter


def counted(*batches, every=1):
    """Returns the records of a loop over `batches`."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer, writer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param), MemoryWriter()
    with probes.Monitor(
        writer, model=model, optimizer=optimizer, every=every, callbacks=(LabelProbe(),), rules=()
    ) as monitor:
        for step, data in enumerate(batches):
            monitor(step, batch=data)
    assert monitor.failures == {}
    return writer.records


def rows(record):
    """Returns path -> (entropy, classes)."""
    values = zip(record.values["labels.entropy"], record.values["labels.classes"], strict=True)
    return dict(zip(record.leaves["labels"].paths, values, strict=True))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_frequencies_of_all_batches_together(on_device, dtype):
    put = jnp.asarray if on_device else np.asarray
    batches = [
        {"x": put(np.ones((4, 2), np.float32)), "y": put(np.array(y, dtype))} for y in ([0, 0, 0, 1], [1, 1, 2, 3])
    ]
    records = counted(*batches)
    shares = np.array([3, 1]) / 4
    first, classes = rows(records[0])["y"]
    assert set(rows(records[0])) == {"y"} and classes == 2
    assert first == pytest.approx(-(shares * np.log(shares)).sum() + 1 / 8)
    shares = np.array([3, 3, 1, 1]) / 8
    second, classes = rows(records[1])["y"]
    assert second == pytest.approx(-(shares * np.log(shares)).sum() + 3 / 16) and classes == 4


def test_the_entropy_of_a_small_sample_is_not_too_small():
    """Without a correction 128 draws from 32 equal classes would give 0.12 nats too little."""
    rng = np.random.default_rng(0)
    found = [rows(counted(rng.integers(0, 32, 128))[0])["value"][0] for _ in range(40)]
    assert np.mean(found) == pytest.approx(math.log(32), abs=0.04)


def test_what_holds_no_classes_is_left_out():
    batch = {
        "negative": np.array([-1, 2]),
        "huge": np.array([0, 1 << 18]),
        "float": np.zeros(3, np.float32),
        "flag": np.array([True, False]),
        "one": np.int32(3),
        "none": np.zeros(0, np.int32),
        "word": "text",
        "key": jax.random.key(0),
        "label": np.array([[0, 1], [1, 1]]),
    }
    assert set(rows(counted(batch)[0])) == {"label"}


def test_a_batch_without_integers_and_no_batch_leave_no_value():
    assert "labels.entropy" not in counted(np.zeros((2, 2), np.float32))[0]
    assert "labels.entropy" not in counted(None)[0]


def test_a_large_array_is_counted_by_its_first_rows():
    ones_later = np.concatenate([np.zeros((64, 1024), np.int32), np.ones((64, 1024), np.int32)])
    assert rows(counted(jnp.asarray(ones_later))[0])["value"][1] == 1


def test_one_class_only_has_no_entropy():
    assert rows(counted(np.zeros(8, np.int32))[0])["value"] == (0.0, 1)


def test_every_is_its_own():
    with pytest.raises(ValueError, match="every"):
        LabelProbe(every=0)


@nnx.jit
def train(model, optimizer, x, y):
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize(("pairs", "fires"), [(False, True), (True, False)])
def test_the_measured_frequencies_tell_guessing_from_learning(pairs, fires):
    """Eight classes of unequal frequency: a model that learns the frequencies alone is below ln 8 and still guesses."""
    rng, model = np.random.default_rng(0), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-2), wrt=nnx.Param)
    frequency = np.arange(1, 9) / 36
    with probes.Monitor(MemoryWriter(), model=model, optimizer=optimizer, every=1) as monitor:
        for step in range(700):
            y = rng.choice(8, 64, p=frequency)
            x = np.eye(8, dtype=np.float32)[y if pairs else rng.permutation(y)]
            monitor(step, loss=train(model, optimizer, x, y), batch={"x": x, "y": y})
    assert ("chance_level" in {a.rule for a in monitor.alerts}) is fires


@pytest.mark.parametrize("size", [8, 1 << 18])  # the second is more than is copied
@pytest.mark.parametrize("on_device", [False, True])
def test_integers_are_copied_without_waiting_and_may_be_freed_at_once(monkeypatch, size, on_device):
    fetched, real = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(x) or real(x))
    labels = np.arange(size) % 4
    batch = jnp.asarray(labels) if on_device else labels.copy()
    probe, ctx = LabelProbe(), probes.callbacks.Context(0, batch={"y": batch})
    probe.on_step_end(ctx)
    assert fetched == [] and len(ctx.later) == 1
    if on_device:
        batch.delete()
    else:
        batch[:] = 7
    values, tables = ctx.later[0].read()
    assert len(fetched) == 1 and ctx.later[0].ready()
    assert values["labels.classes"].tolist() == [4] and tables["labels"].paths == ("y",)
