"""Checkpoints by orbax: a watched optimizer's state fits a plain one and the other way round."""

from __future__ import annotations

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from rig import BATCH, Net, batch, compiled_once, jitted, nothing_fails_inside  # noqa: F401

import nnx_probes as probes

BATCHES = [batch(seed) for seed in range(8)]
SAVED_AT = 6
STEPS = 12
WHEN = pytest.mark.parametrize("when", ["armed", "inside"])


def build(seed=0, when=None):
    model = Net(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    return model, optimizer if when is None else probes.watch(optimizer, model, when=when)


def what_is_saved(model, optimizer):
    """What the documentation of `ProbeState` says to save; for a plain optimizer it is its whole state."""
    return {"model": nnx.state(model), "optimizer": nnx.state(optimizer, nnx.Not(probes.ProbeState))}


def save(folder, model, optimizer):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, what_is_saved(model, optimizer))
        checkpointer.wait_until_finished()


def restore(folder, model, optimizer):
    """Puts a checkpoint into live objects."""
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, what_is_saved(model, optimizer))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(folder, target)
    nnx.update(model, state["model"])
    nnx.update(optimizer, state["optimizer"])


def train(model, optimizer, steps, *, monitored=False, at=lambda step: None):
    """Runs these steps, calls `at` before each; returns (bytes of the losses, records)."""
    writer, losses = probes.writers.MemoryWriter(), []
    if not monitored:
        for step in steps:
            at(step)
            losses.append(np.asarray(jitted(model, optimizer, BATCHES[step % 8])).tobytes())
        return losses, []
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=1) as monitor:
        for step in steps:
            at(step)
            loss = jitted(model, optimizer, BATCHES[step % 8])
            losses.append(np.asarray(loss).tobytes())
            monitor(step, loss=loss)
    assert monitor.failures == {} and [a for a in monitor.alerts if a.level.name != "INFO"] == []
    return losses, [r.step for r in writer.records if "grads.norm" in r]


@pytest.fixture(scope="module")
def uninterrupted():
    """The losses of a plain run that nobody saved or watched."""
    return train(*build(), range(STEPS))[0]


@WHEN
def test_a_watched_optimizer_is_restored_into_a_plain_one(when, tmp_path, uninterrupted):
    model, optimizer = build(when=when)
    seen = []

    def at(step):
        if step == SAVED_AT:
            seen.append("probe_state" in vars(optimizer))
            save(tmp_path / "checkpoint", model, optimizer)

    losses, measured = train(model, optimizer, range(STEPS), monitored=True, at=at)
    assert seen == [True]  # saved between the arming and the step
    assert losses == uninterrupted  # saving disturbed nothing
    assert measured == list(range({"armed": 1, "inside": 0}[when], STEPS))

    model, optimizer = build(seed=1)
    restore(tmp_path / "checkpoint", model, optimizer)
    assert int(optimizer.step[...]) == SAVED_AT
    assert train(model, optimizer, range(SAVED_AT, STEPS))[0] == uninterrupted[SAVED_AT:]


@WHEN
def test_a_plain_optimizer_is_restored_into_a_watched_one(when, tmp_path, uninterrupted):
    model, optimizer = build()
    train(model, optimizer, range(SAVED_AT))
    save(tmp_path / "checkpoint", model, optimizer)

    model, optimizer = build(seed=1, when=when)
    restore(tmp_path / "checkpoint", model, optimizer)
    losses, measured = train(model, optimizer, range(SAVED_AT, STEPS), monitored=True)
    assert losses == uninterrupted[SAVED_AT:]
    assert measured == list(range(SAVED_AT + {"armed": 1, "inside": 0}[when], STEPS))


@WHEN
def test_a_checkpoint_is_restored_in_the_middle_of_a_watched_run(when, tmp_path, uninterrupted):
    """At an armed moment, into the live objects, announced as a restore."""
    model, optimizer = build(when=when)
    losses = []
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1) as monitor:
        for step in [*range(SAVED_AT + 3), *range(SAVED_AT, STEPS)]:
            if step == SAVED_AT and not losses[SAVED_AT:]:
                save(tmp_path / "checkpoint", model, optimizer)
            elif step == SAVED_AT:
                assert "probe_state" in vars(optimizer)
                restore(tmp_path / "checkpoint", model, optimizer)
                monitor.mark(step, "restore")
            loss = jitted(model, optimizer, BATCHES[step % 8])
            losses.append(np.asarray(loss).tobytes())
            monitor(step, loss=loss)
    assert monitor.failures == {} and monitor.alerts == ()
    assert losses[: SAVED_AT + 3] == uninterrupted[: SAVED_AT + 3]
    assert losses[SAVED_AT + 3 :] == uninterrupted[SAVED_AT:]
    assert int(optimizer.step[...]) == STEPS


@WHEN
def test_a_checkpoint_of_a_watched_optimizer_holds_the_same_names_and_bytes_as_a_plain_one(when, tmp_path):
    plain, watched = build(), build(when=when)
    train(*plain, range(SAVED_AT))
    with probes.Monitor(None, model=watched[0], optimizer=watched[1], every=1) as monitor:
        for step in range(SAVED_AT):
            monitor(step, loss=jitted(*watched, BATCHES[step % 8]))
        assert "probe_state" in vars(watched[1])
        for name, objects in (("plain", plain), ("watched", watched)):
            save(tmp_path / name, *objects)
    with ocp.PyTreeCheckpointer() as checkpointer:
        read = [
            jax.tree_util.tree_flatten_with_path(checkpointer.restore(tmp_path / n))[0] for n in ("plain", "watched")
        ]
    names = [[jax.tree_util.keystr(path) for path, _ in found] for found in read]
    assert names[0] == names[1] and len(names[0]) == 4 + 10
    assert [np.asarray(x).tobytes() for _, x in read[0]] == [np.asarray(x).tobytes() for _, x in read[1]]
