"""One process of a run over several, started by test_two_processes.py: prints one JSON object at its end.

Arguments: index, count, port, folder, then the name of a run below.
"""

from __future__ import annotations

import json
import logging
import sys

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")

index, count, port, folder, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=index)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import nnx_probes as probes  # noqa: E402
from nnx_probes.writers import MemoryWriter  # noqa: E402

logging.basicConfig(level=logging.WARNING, stream=sys.stderr)

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(2, -1), ("x", "y"))


def spread(x, *spec):
    """The same host value on every process, as one array over all devices."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(MESH, PartitionSpec(*spec)), lambda at: x[at])


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(4, 8, rngs=rngs)
        self.b = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def build():
    model = Net(nnx.Rngs(0))
    model.a.kernel.set_value(spread(model.a.kernel[...], "x", "y"))
    model.a.bias.set_value(spread(model.a.bias[...], "y"))
    model.b.kernel.set_value(spread(model.b.kernel[...], ("x", "y")))
    model.b.bias.set_value(spread(model.b.bias[...]))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x[:, :2]) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def run(compile_step, steps, every):
    model, optimizer = build()
    step_of = compile_step(train_step)
    memory = MemoryWriter()
    destination = [folder, memory]
    before = probes.fingerprint(model, method="mix64"), probes.fingerprint(optimizer)
    with probes.Monitor(destination, model=model, optimizer=optimizer, every=every) as monitor:
        rng = np.random.default_rng(0)
        for step in range(steps):
            batch = spread(rng.normal(size=(8, 4)).astype(np.float32), ("x", "y"))
            monitor(step, loss=step_of(model, optimizer, batch), batch=batch)
    after = probes.fingerprint(model, method="mix64")
    gathered = {
        path: jax.jit(lambda x: x, out_shardings=NamedSharding(MESH, PartitionSpec()))(value)
        for path, value in [("a.kernel", model.a.kernel[...]), ("b.kernel", model.b.kernel[...])]
    }
    whole = {path: np.asarray(x.addressable_data(0)) for path, x in gathered.items()}
    return {
        "before": before,
        "after": after,
        "whole": probes.fingerprint(
            {"a": {"kernel": jnp.asarray(whole["a.kernel"])}, "b": {"kernel": jnp.asarray(whole["b.kernel"])}},
            method="mix64",
        ),
        "finite": bool(all(np.isfinite(x).all() for x in whole.values())),
        "alerts": [[a.rule, a.level.name, a.step, [c.slug for c in a.causes]] for a in monitor.alerts],
        "failures": monitor.failures,
        "records": [r.step for r in memory.records],
        "losses": [float(r.values["loss"]) for r in memory.records if "loss" in r],
        "paced": [r.values["probes.every"] for r in memory.records],
    }


RUNS = {
    "healthy": lambda: run(nnx.jit, 12, 1),
    "sparse": lambda: run(nnx.jit, 12, 5),
    "frozen": lambda: run(jax.jit, 12, 1),
    "auto": lambda: run(nnx.jit, 200, "auto"),
}

seen = {"devices": len(DEVICES), **RUNS[name]()}
print(json.dumps(seen), flush=True)
