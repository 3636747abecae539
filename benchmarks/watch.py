"""What a watched step costs: unarmed, armed and "inside", each against the plain step, in one run.

    python benchmarks/watch.py [--quick]

Steps of the variants are interleaved, so that drift of the machine hits all alike; printed are the median step time and the
median (10th to 90th percentile) of the ratios of neighbouring steps. Compilation is left out and printed beside it.
"""

from __future__ import annotations

import argparse
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_probes as probes


class Perceptron(nnx.Module):
    def __init__(self, rngs, width, depth):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


class Block(nnx.Module):
    def __init__(self, rngs, width, heads):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs, width, depth, vocabulary):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, width, 4) for _ in range(depth)])
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def perceptron_loss(model, x):
    return jnp.mean((model(x) - x) ** 2)


def language_loss(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()


def programs(quick):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 256)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 512, size=(8, 128)))
    yield "perceptron 4 x 256", lambda: Perceptron(nnx.Rngs(0), 256, 4), perceptron_loss, x, 40 if quick else 200
    if not quick:
        yield "transformer 8M", lambda: Transformer(nnx.Rngs(0), 320, 6, 512), language_loss, tokens, 20


def variants(build, loss):
    """Yields (name, step of no arguments but the batch)."""

    def step_of(model, optimizer):
        @nnx.jit(donate_argnums=(0, 1))
        def train_step(model, optimizer, batch):
            value, grads = nnx.value_and_grad(loss)(model, batch)
            optimizer.update(model, grads)
            return value

        return lambda batch: train_step(model, optimizer, batch)

    model = build()
    yield "plain", step_of(model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    model = build()
    yield "watched, not due", step_of(model, probes.watch(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), model))
    model = build()
    armed = probes.watch(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), model)
    run = step_of(model, armed)

    def due(batch):
        armed.arm(0)
        value = run(batch)
        armed.disarm(0)
        return value

    yield "watched, due", due
    model = build()
    inside = probes.watch(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), model, when="inside")
    inside.set_interval(100)
    yield "inside, every 100", step_of(model, inside)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    print(f"{platform.machine()}, {jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("| program | variant | compile, s | step, ms | against plain |\n| --- | --- | ---: | ---: | ---: |")
    for name, build, loss, batch, n in programs(quick):
        steps = dict(variants(build, loss))
        compile_s = {}
        for variant, step in steps.items():
            began = time.perf_counter()
            for _ in range(3):
                jax.block_until_ready(step(batch))
            compile_s[variant] = time.perf_counter() - began
        times = {variant: [] for variant in steps}
        for _ in range(n):
            for variant, step in steps.items():
                began = time.perf_counter()
                jax.block_until_ready(step(batch))
                times[variant].append(time.perf_counter() - began)
        plain = np.array(times["plain"])
        for variant, seconds in times.items():
            low, middle, high = np.percentile(np.array(seconds) / plain, [10, 50, 90])
            print(
                f"| {name} | {variant} | {compile_s[variant]:.1f} | {1e3 * float(np.median(seconds)):.2f} "
                f"| {middle:.2f} ({low:.2f} to {high:.2f}) |"
            )


if __name__ == "__main__":
    main()
