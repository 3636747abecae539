"""`fit`: what it refuses, that every callback is closed, and what it keeps alive."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from rig import BATCH, build, compiled_once, jitted, nothing_fails_inside  # noqa: F401

import nnx_probes as probes
from nnx_probes.errors import ArgumentError, ArgumentTypeError
from nnx_probes.writers import MemoryWriter


class Noted(probes.Callback):
    """Notes what it was called with."""

    def __init__(self, fails=""):
        self.fails = fails
        self.losses, self.ended = [], 0

    def on_train_begin(self, ctx):
        if self.fails == "begin":
            raise KeyError("begin")

    def on_eval_end(self, ctx):
        self.losses.append((ctx.step, ctx.loss))

    def on_train_end(self, ctx):
        self.ended += 1
        if self.fails == "end":
            raise KeyError("end")


def fit(callbacks=(), *, steps=6, step=jitted, batches=(BATCH,) * 20, **settings):
    model, optimizer = build()
    return probes.fit(step, model, optimizer, batches, steps=steps, callbacks=callbacks, **settings)


def count(model, batch):
    return np.float32(batch)


def test_an_evaluation_is_the_mean_over_fresh_batches():
    noted, writer = Noted(), MemoryWriter()
    monitor = probes.Monitor(writer, every=1)
    fit([noted, monitor], eval_step=count, eval_batches=lambda: iter([1, 2, 6]), eval_every=2)
    assert noted.losses == [(1, 3.0), (3, 3.0), (5, 3.0)]
    assert [(r.step, r.values["eval.loss"]) for r in writer.records if "eval.loss" in r] == noted.losses


def test_an_evaluation_without_a_batch_is_none():
    noted, spent, writer = Noted(), iter([2.0]), MemoryWriter()
    monitor = probes.Monitor(writer, every=1)
    fit([noted, monitor], eval_step=count, eval_batches=lambda: spent, eval_every=2)
    assert noted.losses == [(1, 2.0)]
    assert [r.step for r in writer.records if "eval.loss" in r] == [1]


@pytest.mark.parametrize("batches", [iter([1, 2]), (x for x in [1]), {1, 2}, "abc", 3])
def test_batches_that_can_be_gone_through_once_only_are_refused(batches):
    with pytest.raises(ArgumentTypeError, match="a function that returns a fresh iterable, for example lambda"):
        fit(eval_step=count, eval_batches=batches, eval_every=2)


@pytest.mark.parametrize("every, error", [(0, ArgumentError), (-1, ArgumentError), (2.0, TypeError), (True, TypeError)])
def test_the_interval_of_evaluations_is_a_whole_number(every, error):
    with pytest.raises(error, match="eval_every"):
        fit(eval_step=count, eval_batches=[1], eval_every=every)


@pytest.mark.parametrize("fails", ["begin", "end", "step"])
def test_every_callback_is_closed_whatever_one_of_them_or_the_step_raises(fails):
    first, writer, last = Noted(fails), MemoryWriter(), Noted()
    monitor = probes.Monitor(writer, every=1)

    def step(model, optimizer, batch):
        if fails == "step":
            raise KeyError("step")
        return jitted(model, optimizer, batch)

    with pytest.raises(KeyError, match=fails):
        fit([first, monitor, last], step=step)
    assert (first.ended, last.ended) == (1, 1)
    assert monitor._closed


def test_all_that_fail_at_the_end_are_closed():
    callbacks = [Noted("end"), Noted(), Noted("end")]
    with pytest.raises(KeyError, match="end"):
        fit(callbacks)
    assert [c.ended for c in callbacks] == [1, 1, 1]


class Preparing(probes.Callback):
    def before_due(self, ctx):
        pass


class OwnParams(probes.ParamProbe):
    pass


@pytest.mark.parametrize(
    "callback", [probes.ParamProbe(), OwnParams(), probes.LossProbe(), probes.callbacks.ModeProbe(), Preparing()]
)
def test_what_measures_for_a_monitor_is_refused_outside_one(callback):
    name = type(callback).__name__
    with pytest.raises(ArgumentError, match=rf"{name} measures for a monitor.*Monitor\(\.\.\., callbacks="):
        fit([Noted(), callback])


class Batch:
    """Something a weak reference can point at."""

    def __init__(self):
        self.data = BATCH


@pytest.mark.parametrize("watched", [False, True])
def test_neither_batch_nor_result_is_kept_for_the_next_step(watched):
    alive, seen = [], []

    def batches():
        for _ in range(5):
            alive.append(sum(ref() is not None for ref in seen))
            batch = Batch()
            seen.append(weakref.ref(batch))
            yield batch
            del batch

    def step(model, optimizer, batch):
        alive.append(sum(ref() is not None for ref in seen if ref() is not batch))
        out = Batch()
        seen.append(weakref.ref(out))
        return {"loss": jitted(model, optimizer, batch.data), "out": out}

    callbacks = [probes.Monitor(None, every=2)] if watched else [Noted()]
    assert fit(callbacks, step=step, batches=batches(), steps=5) == 5
    assert alive == [0] * 10


def test_callbacks_may_come_from_a_generator():
    noted = Noted()
    assert fit(iter([noted])) == 6 and noted.ended == 1
