"""Run by test_sharding.py in a process with four CPU devices: prints one JSON object, name of check -> what was seen."""

from __future__ import annotations

import json
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nnx_probes as probes
from nnx_probes.device.mix64 import mix64, mix64_text
from nnx_probes.device.probe import Probe
from nnx_probes.writers import MemoryWriter

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(2, 2), ("x", "y"))
SHARDINGS = {
    "replicated": PartitionSpec(),
    "rows": PartitionSpec("x"),
    "columns": PartitionSpec(None, "y"),
    "both": PartitionSpec("x", "y"),
    "rows over all": PartitionSpec(("y", "x")),
}


WHOLE = PartitionSpec()


def put(x, spec=WHOLE, mesh=MESH):
    return jax.device_put(x, NamedSharding(mesh, spec))


def hosts():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(8, 4, 3))
    return {
        "float32": values.astype(np.float32),
        "bfloat16": jnp.asarray(values, jnp.bfloat16),
        "complex64": (values + 1j * values[::-1]).astype(np.complex64),
        "int4": jnp.asarray(rng.integers(-8, 8, (8, 4, 3)), jnp.int4),
        "bool": values > 0,
    }


def values_of_mix64():
    program = jax.jit(mix64)
    return {
        dtype: {
            "unsharded": mix64_text(program(jnp.asarray(x))),
            **{name: mix64_text(program(put(x, spec))) for name, spec in SHARDINGS.items()},
        }
        for dtype, x in hosts().items()
    }


def values_of_fingerprint(method):
    x = hosts()["float32"]
    trees = {"unsharded": jnp.asarray(x), **{name: put(x, spec) for name, spec in SHARDINGS.items()}}
    return {"float32": {name: probes.fingerprint({"x": x}, method=method)["x"] for name, x in trees.items()}}


def keys():
    key = jax.random.split(jax.random.key(3), 4)
    return {
        "key": {
            "unsharded": probes.fingerprint(key, method="mix64")["value"],
            "rows": probes.fingerprint(put(key, PartitionSpec("x")), method="mix64")["value"],
        }
    }


def statistics():
    """Rows of a probe of all shardings at once, and of the same array unsharded."""
    x = hosts()["float32"]
    x[5, 1, 2] = np.nan
    trees = {"alone": {"a": jnp.asarray(x)}, "together": {name: put(x, spec) for name, spec in SHARDINGS.items()}}
    samples = {name: Probe(tree, fingerprints="mix64").enqueue().fetch() for name, tree in trees.items()}
    return {name: [s.nonfinite.tolist(), sorted(set(s.fingerprints))] for name, s in samples.items()}


def probe_under_guard(tree):
    probe = Probe(tree, fingerprints="mix64")
    with jax.transfer_guard("disallow"):
        sample = probe.enqueue().fetch()
    rows = zip(sample.leaves, sample.norm, sample.fingerprints, strict=True)
    return {leaf.path: [float(norm), text] for leaf, norm, text in rows}


def two_devices():
    return probe_under_guard(
        {"a": jax.device_put(jnp.arange(3.0), DEVICES[0]), "b": jax.device_put(jnp.arange(3.0), DEVICES[1])}
    )


def free_and_bound():
    return probe_under_guard({"a": jnp.arange(3.0), "b": jax.device_put(jnp.arange(3.0), DEVICES[1])})


def free_and_sharded():
    return probe_under_guard({"a": jnp.arange(4.0), "b": put(jnp.arange(4.0), PartitionSpec("x"))})


def one_and_sharded():
    return probe_under_guard(
        {"a": jax.device_put(jnp.arange(4.0), DEVICES[2]), "b": put(jnp.arange(4.0), PartitionSpec("x"))}
    )


def two_meshes():
    turned = Mesh(np.array(DEVICES[::-1]).reshape(2, 2), ("x", "y"))
    return probe_under_guard(
        {"a": put(jnp.arange(4.0), PartitionSpec("x")), "b": put(jnp.arange(4.0), PartitionSpec("x"), turned)}
    )


def monitor():
    """A run on sharded parameters, with a NaN batch at the end."""
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    model.kernel[...] = put(model.kernel[...], PartitionSpec("x", "y"))
    model.bias[...] = put(model.bias[...], PartitionSpec("y"))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    memory = MemoryWriter()
    params = probes.ParamProbe(fingerprints="mix64")
    callbacks = [params, probes.OptimizerProbe(), probes.LossProbe(), probes.callbacks.BatchProbe()]
    with probes.Monitor(memory, model=model, optimizer=optimizer, every=1, callbacks=callbacks) as monitor:
        for step in range(6):
            x = np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32)
            batch = put(x if step < 5 else x * np.nan, PartitionSpec(("x", "y")))
            monitor(step, loss=train_step(model, optimizer, batch), batch=batch)
    last = memory.records[4].values["params.fingerprint"]
    return {
        "steps": [r.step for r in memory.records],
        "failures": monitor.failures,
        "alerts": [[a.rule, a.step] for a in monitor.alerts],
        "moved": len({r.values["params.fingerprint"] for r in memory.records}),
        "labels": sorted({text.split(":")[0] for text in last}),
        "layouts": [list(model.kernel[...].sharding.spec), params._group.probe.traces],
    }


CHECKS = {
    "mix64": values_of_mix64,
    "fingerprint mix64": lambda: values_of_fingerprint("mix64"),
    "fingerprint xxh3": lambda: values_of_fingerprint("xxh3"),
    "keys": keys,
    "statistics": statistics,
    "two devices": two_devices,
    "free and bound": free_and_bound,
    "free and sharded": free_and_sharded,
    "one and sharded": one_and_sharded,
    "two meshes": two_meshes,
    "monitor": monitor,
}

if __name__ == "__main__":
    seen = {}
    for name, check in CHECKS.items():
        try:
            seen[name] = check()
        except Exception:
            seen[name] = {"error": traceback.format_exc()}
    print(json.dumps(seen))
