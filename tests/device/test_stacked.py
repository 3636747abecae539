"""Which parameters hold several layers along one axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_probes.device.slots import Params
from nnx_probes.device.stacked import layer_axes

DEPTH = 4


def stack(make, depth=DEPTH, out_axes=0):
    """`depth` layers made by ``nnx.vmap`` of their constructor."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=0, out_axes=out_axes)
    def layers(rngs):
        return make(rngs)

    return layers(nnx.Rngs(0))


def found(model):
    """Path -> axis, of the Variables that were found."""
    axes = layer_axes(model)
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable))
    names = {jax.tree_util.keystr(keys, simple=True, separator="."): axes.get(id(v)) for keys, v in leaves}
    assert len([axis for axis in names.values() if axis is not None]) == len(
        axes
    )  # it names Variables of the model only
    return {name: axis for name, axis in names.items() if axis is not None}


class Block(nnx.Module):
    """With an attention, a custom parameter, running statistics and a random state."""

    def __init__(self, rngs):
        self.lin = nnx.Linear(6, 6, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.gamma = nnx.Param(jnp.ones((6,)))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda rngs: nnx.Linear(6, 6, rngs=rngs), {"kernel", "bias"}),
        (lambda rngs: nnx.Linear(6, 5, use_bias=False, rngs=rngs), {"kernel"}),
        (lambda rngs: nnx.LayerNorm(6, rngs=rngs), {"scale", "bias"}),
        (lambda rngs: nnx.RMSNorm(6, rngs=rngs), {"scale"}),
        (lambda rngs: nnx.BatchNorm(6, rngs=rngs), {"scale", "bias", "mean", "var"}),
        (lambda rngs: nnx.Embed(7, 6, rngs=rngs), {"embedding"}),
        (lambda rngs: nnx.Conv(3, 5, (3, 3), rngs=rngs), {"kernel", "bias"}),
        (lambda rngs: nnx.LinearGeneral((2, 3), (3, 2), axis=(-2, -1), rngs=rngs), {"kernel", "bias"}),
    ],
    ids=["Linear", "Linear without bias", "LayerNorm", "RMSNorm", "BatchNorm", "Embed", "Conv", "LinearGeneral"],
)
def test_layers_made_by_vmap_are_found_along_the_first_axis(make, names):
    assert found(stack(make)) == dict.fromkeys(names, 0)


def test_a_stacked_block_is_found_with_its_custom_parameter_and_its_attention():
    names = {f"attn.{part}.{name}" for part in ("query", "key", "value", "out") for name in ("kernel", "bias")}
    names |= {"lin.kernel", "lin.bias", "norm.scale", "norm.bias", "norm.mean", "norm.var", "gamma"}
    assert found(stack(Block)) == dict.fromkeys(names, 0)


def test_a_stack_inside_a_model_is_found_and_its_neighbours_are_not():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(DEPTH, 6, rngs=rngs)
            self.position = nnx.Param(jnp.ones((DEPTH, 6)))
            self.blocks = stack(lambda rngs: nnx.Linear(6, 6, rngs=rngs))
            self.head = nnx.Linear(6, 2, rngs=rngs)

    assert found(Model(nnx.Rngs(0))) == {"blocks.kernel": 0, "blocks.bias": 0}


def test_stacks_of_different_depth_are_found_side_by_side_and_in_lists():
    layers = [stack(lambda rngs: nnx.Linear(6, 6, rngs=rngs), depth) for depth in (2, 3)]
    model = nnx.Sequential(*layers, nnx.relu, nnx.Linear(6, 2, rngs=nnx.Rngs(0)))
    assert found(model) == {f"layers.{i}.{name}": 0 for i in (0, 1) for name in ("kernel", "bias")}


def test_a_kernel_stacked_along_its_second_axis_is_found_there():
    layers = stack(lambda rngs: nnx.Linear(6, 5, rngs=rngs), out_axes=1)
    assert layers.kernel.shape == (6, DEPTH, 5) and found(layers) == {"kernel": 1}


def test_a_stack_of_one_layer_is_a_stack():
    assert found(stack(lambda rngs: nnx.Linear(6, 5, rngs=rngs), depth=1)) == {"kernel": 0, "bias": 0}


class Square(nnx.Module):
    """Every dimension is 4, as if everything could be a stack of 4."""

    def __init__(self, rngs):
        self.lin = nnx.Linear(4, 4, rngs=rngs)
        self.embed = nnx.Embed(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.conv = nnx.Conv(4, 4, (4, 4), rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, 16, rngs=rngs)
        self.own = nnx.Param(jnp.ones((4, 4, 4)))


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: nnx.Linear(6, 6, rngs=rngs),
        lambda rngs: nnx.Conv(6, 6, (6,), rngs=rngs),
        lambda rngs: nnx.Conv(4, 4, (2, 2), feature_group_count=2, rngs=rngs),
        lambda rngs: nnx.MultiHeadAttention(4, 16, rngs=rngs),
        lambda rngs: nnx.Linear(6, 6, param_dtype=jnp.bfloat16, rngs=rngs),
        lambda rngs: nnx.LayerNorm(6, use_scale=False, rngs=rngs),
        lambda rngs: nnx.LinearGeneral((4, 4), (4, 4), axis=(-2, -1), rngs=rngs),
        Square,
    ],
    ids=[
        "Linear",
        "Conv",
        "grouped Conv",
        "MultiHeadAttention",
        "bfloat16",
        "LayerNorm without scale",
        "LinearGeneral",
        "Square",
    ],
)
def test_a_single_layer_is_not_a_stack(make):
    assert found(make(nnx.Rngs(0))) == {}


def test_several_equal_layers_in_a_list_are_not_a_stack():
    assert found(nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)])) == {}


def test_a_stack_without_any_known_layer_is_not_found():
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(rngs.params.normal((6, 6)))

    assert found(stack(Own)) == {}


def test_shared_and_cyclic_modules_are_visited_once():
    model = nnx.Sequential(stack(lambda rngs: nnx.Linear(6, 6, rngs=rngs)))
    model.again = model.layers[0]
    model.itself = nnx.data(model)
    axes = layer_axes(model)
    assert axes == {id(model.again.kernel): 0, id(model.again.bias): 0}


@pytest.mark.parametrize("value", [None, {"w": np.ones((4, 6, 6))}, [jnp.ones((4, 6))], lambda: None])
def test_what_is_no_module_has_no_stacks(value):
    assert layer_axes(value) == {}


def test_parameters_know_their_axis_and_their_rows():
    slots, arrays = Params().read(stack(Block), nnx.Param)
    by_path = {slot.parts: slot for slot in slots}
    assert by_path["gamma",].axis == by_path["lin", "kernel"].axis == 0 and by_path["gamma",].rows == DEPTH
    assert [slot.shape for slot in slots] == [x.shape for x in arrays]
    assert not any("mean" in slot.parts for slot in slots)


def test_a_square_bias_beside_a_kernel_stacked_along_its_second_axis_is_not_said_to_lie_along_the_first():
    layers = stack(lambda rngs: nnx.Linear(6, DEPTH, rngs=rngs), out_axes=1)
    assert layers.bias.shape == (DEPTH, DEPTH) and found(layers).get("bias") in (None, 1)


def test_a_layer_with_one_kernel_for_each_element_of_a_batch_axis_is_not_a_stack():
    assert found(nnx.LinearGeneral(6, 5, axis=-1, batch_axis={0: 4}, rngs=nnx.Rngs(0))) == {}
