"""What people use in place of this library, written as plainly as each is usually written. Every one looks at each step.

Each function takes a `Program` and returns a function that runs one step, looks, and returns the seconds that looking took
on the training thread (NaN where the looking is inside the compiled step).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from models import Program, adam, step_of

One = Callable[[], float]


def plain(program: Program) -> One:
    """The user's loop, watched by nobody."""
    model = program.build()
    optimizer, step, feed = adam(model), step_of(program.loss), program.feed()

    def one() -> float:
        jax.block_until_ready(step(model, optimizer, next(feed)))
        return 0.0

    return one


def hash_of_bytes(program: Program) -> One:
    """``hash(np.asarray(p).tobytes())`` of every parameter."""
    model = program.build()
    optimizer, step, feed = adam(model), step_of(program.loss), program.feed()

    def one() -> float:
        jax.block_until_ready(step(model, optimizer, next(feed)))
        began = time.perf_counter()
        for p in jax.tree.leaves(nnx.state(model, nnx.Param)):
            hash(np.asarray(p).tobytes())
        return time.perf_counter() - began

    return one


def item_per_leaf(program: Program) -> One:
    """A norm of every parameter, one kernel launch and one ``.item()`` a leaf."""
    model = program.build()
    optimizer, step, feed = adam(model), step_of(program.loss), program.feed()

    def one() -> float:
        jax.block_until_ready(step(model, optimizer, next(feed)))
        began = time.perf_counter()
        for p in jax.tree.leaves(nnx.state(model, nnx.Param)):
            jnp.linalg.norm(p.reshape(-1)).item()
        return time.perf_counter() - began

    return one


def _norms(tree: Any) -> jax.Array:
    return jnp.stack([jnp.linalg.norm(x.reshape(-1)) for x in jax.tree.leaves(tree)])


def snapshot(program: Program) -> One:
    """Norms of gradients and updates through ``optax.snapshot``, read every step."""
    model = program.build()
    chain = optax.chain(
        optax.snapshot("grads", _norms), optax.adam(1e-4), optax.snapshot("updates", lambda u: _norms(u))
    )
    optimizer, step, feed = nnx.Optimizer(model, chain, wrt=nnx.Param), step_of(program.loss), program.feed()

    def one() -> float:
        jax.block_until_ready(step(model, optimizer, next(feed)))
        state = nnx.state(optimizer).to_pure_dict()["opt_state"]
        jax.device_get([optax.tree.get(state, name) for name in ("grads", "updates")])
        return math.nan

    return one


def cond(program: Program) -> One:
    """Norms of gradients and parameters inside the step, under a ``lax.cond`` that is true every tenth step."""
    model = program.build()
    optimizer, feed = adam(model), program.feed()
    leaves = len(jax.tree.leaves(nnx.state(model, nnx.Param)))

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        value, grads = nnx.value_and_grad(program.loss)(model, batch)
        optimizer.update(model, grads)
        look = optimizer.step[...] % 10 == 0
        params = nnx.state(model, nnx.Param)
        found = lax.cond(
            look, lambda: jnp.stack([_norms(grads), _norms(params)]), lambda: jnp.zeros((2, leaves), jnp.float32)
        )
        return value, found

    steps = 0

    def one() -> float:
        nonlocal steps
        loss, found = train_step(model, optimizer, next(feed))
        jax.block_until_ready(loss)
        steps += 1
        if steps % 10 == 0:
            jax.device_get(found)
        return math.nan

    return one


RIVALS: dict[str, Callable[[Program], One]] = {
    "hash of bytes, every step": hash_of_bytes,
    "optax.snapshot norms, every step": snapshot,
    "lax.cond in the step, every 10": cond,
    ".item() per leaf, every step": item_per_leaf,
}
