"""One process of a run over several, started by test_two_processes.py: prints one JSON object at its end.

Arguments: index, count, port, folder, then names of runs (below).
"""

from __future__ import annotations

import json
import sys

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")

index, count, port, folder, *names = sys.argv[1:]
index = int(index)
jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=index)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from conftest import Net  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import nnx_probes as probes  # noqa: E402
from nnx_probes.host.pace import Pace  # noqa: E402
from nnx_probes.writers import MemoryWriter  # noqa: E402

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(2, -1), ("x", "y"))


def spread(x, *spec):
    """The same host value on every process, as one array over all devices."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(MESH, PartitionSpec(*spec)), lambda at: x[at])


def build():
    model = Net(nnx.Rngs(0))
    model.a.kernel.set_value(spread(model.a.kernel[...], None, ("x", "y")))
    model.a.bias.set_value(spread(model.a.bias[...], "y"))
    model.b.kernel.set_value(spread(model.b.kernel[...], ("x", "y")))
    model.b.bias.set_value(spread(model.b.bias[...]))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x[:, :2]) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def whole(x):
    """All of `x`, as an array of this process alone."""
    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(MESH, PartitionSpec()))(x)
    return jnp.asarray(np.asarray(gathered.addressable_data(0)))


def run(compile_step, name, every=1, steps=12, when=None):
    model, optimizer = build()
    if when is not None:
        optimizer = probes.watch(optimizer, model, when=when, fingerprints=True)
    step_of, memory = compile_step(train_step), MemoryWriter()
    before = probes.fingerprint(model)
    with probes.Monitor([f"{folder}/{name}", memory], model=model, optimizer=optimizer, every=every) as monitor:
        rng = np.random.default_rng(0)
        for step in range(steps):
            batch = spread(rng.normal(size=(8, 3)).astype(np.float32), ("x", "y"))
            loss = jax.block_until_ready(step_of(model, optimizer, batch))  # gloo hangs with many steps in flight
            monitor(step, loss=loss, batch=batch)
    alone = jax.tree.map(whole, nnx.to_pure_dict(nnx.state(model)))
    return {
        "before": before,
        "after": probes.fingerprint(model),
        "after, gathered": probes.fingerprint(alone, method="mix64"),
        "finite": all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(alone)),
        "alerts": [[a.rule, a.level.name, a.step, a.message, [c.slug for c in a.causes]] for a in monitor.alerts],
        "failures": monitor.failures,
        "losses": [r.values["loss"] for r in memory.records],
        "grads": [[r.step, r.values["grads.norm"].tolist()] for r in memory.records if "grads.norm" in r],
        "records": [[r.step, list(r.values["params.fingerprint"])] for r in memory.records],
    }


def auto():
    """Probing seems cheap to the first process and dear to the second."""
    spent = Pace.spent
    Pace.spent = lambda self, cost_s, step_s: spent(self, (1e-6, 1e6)[index], 1.0)
    return run(nnx.jit, "auto", every="auto", steps=60)


RUNS = {
    "healthy": lambda: run(nnx.jit, "healthy"),
    "sparse": lambda: run(nnx.jit, "sparse", every=5),
    "frozen": lambda: run(jax.jit, "frozen"),
    "auto": auto,
    "watched": lambda: run(nnx.jit, "watched", every=3, when="armed"),
    "inside": lambda: run(nnx.jit, "inside", every=3, when="inside"),
}

print(
    json.dumps({"devices": [len(DEVICES), jax.local_device_count()], **{name: RUNS[name]() for name in names}}),
    flush=True,
)
