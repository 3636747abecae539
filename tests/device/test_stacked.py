"""Which parameters are stacks of layers."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax import nnx

from nnx_probes.device.stacked import layer_axes


def stacked(make, n=4, out_axes=0):
    return nnx.split_rngs(splits=n)(nnx.vmap(make, in_axes=0, out_axes=out_axes))(nnx.Rngs(0))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.lin, self.norm = nnx.Linear(6, 6, rngs=rngs), nnx.LayerNorm(6, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((5,)))


def names(model):
    """Path -> axis of every stacked Variable."""
    axes = layer_axes(model)
    return {".".join(map(str, path)): axes[id(v)] for path, v in nnx.iter_graph(model) if id(v) in axes}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda r: nnx.Linear(6, 6, rngs=r), {"kernel", "bias"}),
        (lambda r: nnx.Linear(4, 3, rngs=r), {"kernel", "bias"}),
        (lambda r: nnx.LayerNorm(6, rngs=r), {"scale", "bias"}),
        (lambda r: nnx.Embed(7, 3, rngs=r), {"embedding"}),
        (lambda r: nnx.Conv(2, 3, (3, 3), rngs=r), {"kernel", "bias"}),
        (Block, {"lin.kernel", "lin.bias", "norm.scale", "norm.bias", "scale"}),
    ],
)
def test_what_vmap_makes_of_a_constructor_is_found(make, expected):
    found = names(stacked(make))
    assert {path for path in found if not path.endswith("count")} == expected and set(found.values()) == {0}


def test_layers_along_another_axis_are_found_there():
    assert names(stacked(lambda r: nnx.Linear(6, 3, use_bias=False, rngs=r), out_axes=1)) == {"kernel": 1}


@pytest.mark.parametrize(
    "make",
    [
        lambda r: nnx.Linear(6, 6, rngs=r),
        lambda r: nnx.Conv(4, 4, (4, 4), rngs=r),
        lambda r: nnx.MultiHeadAttention(4, 4, 4, decode=False, rngs=r),
        lambda r: nnx.LinearGeneral((4, 4), (4, 4), axis=(-2, -1), rngs=r),
        Block,
        lambda r: nnx.List([nnx.Linear(4, 4, rngs=r) for _ in range(4)]),
    ],
)
def test_single_layers_are_not_taken_for_stacks(make):
    assert names(make(nnx.Rngs(0))) == {}


def test_a_stack_beside_single_layers_is_the_only_one_found():
    class Model(nnx.Module):
        def __init__(self):
            self.stack = stacked(lambda r: nnx.Linear(4, 4, rngs=r))
            self.out = nnx.Linear(4, 4, rngs=nnx.Rngs(1))
            self.own = nnx.Param(jnp.ones((4, 4)))

    assert names(Model()) == {"stack.kernel": 0, "stack.bias": 0}
