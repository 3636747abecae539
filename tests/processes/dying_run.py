"""A training run that ends badly, started by test_kill.py. Arguments: folder, way to end."""

from __future__ import annotations

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
from conftest import Run

import nnx_probes as probes

folder, way = sys.argv[1:]
LAST = 7
"""The step after which it ends; it is probed at every step."""

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored

run = Run()
frozen = jax.jit(lambda model, optimizer, batch: jnp.mean(model(batch[0])))


def steps(monitor):
    for step in range(20):
        loss = frozen(run.model, run.optimizer, run.batch()) if way.startswith("alert") else run.step()
        if way.endswith("nan") and step == LAST - 1:
            loss = loss * np.nan
        monitor(step, loss=loss)
        if step == LAST:
            # Said without a flush of ours: what the test expects on disk is what the monitor says here.
            print(*[f"{a.rule}@{a.step}" for a in monitor.alerts], flush=True)
            end()


def end():
    if "kill" in way:
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif way == "exception":
        raise ZeroDivisionError("the user's own")
    elif way == "exit":
        sys.exit(3)
    elif way.startswith("forgets"):
        raise StopIteration


if way.startswith("forgets"):
    monitor = probes.Monitor(folder, model=run.model, optimizer=run.optimizer, every=1)
    try:
        steps(monitor)
    except StopIteration:
        print("the script ends here")
else:
    with probes.Monitor(folder, model=run.model, optimizer=run.optimizer, every=1) as monitor:
        steps(monitor)
