"""Which arrays a `Tree` finds, what it calls them, and that it works the names out once."""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_probes.device.leaves import Tree
from nnx_probes.device.probe import Probe
from nnx_probes.errors import ArgumentTypeError


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.b = nnx.Linear(4, 2, use_bias=False, rngs=rngs)


@pytest.fixture
def net():
    return Net(nnx.Rngs(0))


@pytest.fixture
def walks(monkeypatch):
    """How often names were worked out."""
    seen = []
    whole = Tree._name

    def counted(self, *args):
        seen.append(1)
        return whole(self, *args)

    monkeypatch.setattr(Tree, "_name", counted)
    return seen


def read(source):
    tree = Tree(source)
    values = tree.read()
    assert len(values) == len(tree.leaves) == len(tree.ids)
    return tree, values


def paths(source):
    return [leaf.path for leaf in read(source)[0].leaves]


NET = [
    "a.bias",
    "a.kernel",
    "b.kernel",
    "drop.rngs.count",
    "drop.rngs.key",
    "norm.bias",
    "norm.mean",
    "norm.scale",
    "norm.var",
]

# --- what a source can be -----------------------------------------------------------------------------------


def test_a_module_gives_every_variable_with_its_kind_shape_and_dtype(net):
    tree, values = read(net)
    leaves = {leaf.path: leaf for leaf in tree.leaves}
    assert sorted(leaves) == NET
    kernel = leaves["a.kernel"]
    assert (kernel.parts, kernel.kind, kernel.variable) == (("a", "kernel"), "Param", nnx.Param)
    assert (kernel.shape, kernel.dtype) == ((3, 4), "float32")
    assert {leaves[p].kind for p in ("norm.mean", "norm.var")} == {"BatchStat"}
    assert leaves["drop.rngs.key"].dtype == "key<fry>"
    by_path = dict(zip((leaf.path for leaf in tree.leaves), values, strict=True))
    assert by_path["a.kernel"] is net.a.kernel.get_value()


def test_an_optimizer_gives_its_step_and_its_state(net):
    found = paths(nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param))
    assert "step" in found and "opt_state.0.mu.a.kernel" in found and len(found) == len(set(found)) == 12


@pytest.mark.parametrize(
    "view",
    [
        nnx.state,
        lambda m: nnx.split(m)[1],
        lambda m: nnx.to_pure_dict(nnx.state(m)),
        lambda m: nnx.as_pure(nnx.state(m)),
        lambda m: lambda: m,
        lambda m: lambda: nnx.state(m),
    ],
    ids=["state", "split", "pure dict", "as_pure", "getter", "getter of a state"],
)
def test_every_view_of_a_model_has_the_same_paths(net, view):
    assert sorted(paths(view(net))) == NET


def test_a_nested_pytree_of_host_and_device_arrays_and_numbers():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Pair:
        left: object
        right: object

    Point = collections.namedtuple("Point", "x y")
    source = {
        "list": [jnp.ones(2), (np.ones(3), 1.5)],
        "pair": Pair(Point(1, True), {"deep": jnp.zeros(())}),
        "none": None,
    }
    assert paths(source) == ["list.0", "list.1.0", "list.1.1", "pair.left.x", "pair.left.y", "pair.right.deep"]
    tree, _ = read(source)
    assert {leaf.kind for leaf in tree.leaves} == {"array"} and {leaf.variable for leaf in tree.leaves} == {None}
    assert [leaf.dtype for leaf in tree.leaves] == ["float32", "float64", "float", "int", "bool", "float32"]


def test_a_single_array_is_called_value():
    assert paths(jnp.ones(3)) == ["value"] and paths(2.5) == ["value"]


def test_text_and_other_objects_beside_arrays_are_passed_over():
    assert paths({"name": "x", "fn": print, "array": np.ones(1), "nothing": None, "object": object()}) == ["array"]


@pytest.mark.parametrize(
    "text", [np.array(["a", "b"]), np.array([None, 1], object), np.array(["2020"], "datetime64[D]")]
)
def test_host_arrays_that_are_no_numbers_are_passed_over(text):
    source = {"text": text, "x": np.ones(2, np.float32)}
    assert paths(source) == ["x"]
    assert Probe(source).enqueue().fetch().norm.tolist() == [np.float32(2**0.5)]


def test_a_variable_that_holds_a_pytree_is_not_lost():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(1))
            self.cache = nnx.Cache({"keys": jnp.ones(2), "values": jnp.ones(3)})

    assert sorted(paths(Model())) == ["cache.keys", "cache.values", "w"]


@pytest.mark.parametrize("empty", [{}, [], None, "text", {"a": "x"}, lambda: {}], ids=range(6))
def test_nothing_to_measure_is_told_in_words(empty):
    seen = empty() if callable(empty) else empty
    text = (
        f"found no array in the {type(seen).__name__}: expected a Module, an Optimizer, a State, a pytree of arrays, or a "
        "function without arguments that returns one. Pass the object that your training step changes."
    )
    with pytest.raises(ArgumentTypeError, match=f"^{re.escape(text)}$"):
        Tree(empty).read()


# --- names --------------------------------------------------------------------------------------------------


def test_tied_weights_count_once_under_their_first_path():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Linear(4, 4, rngs=rngs)
            self.head = nnx.Linear(4, 4, rngs=rngs)
            self.head.kernel = self.embed.kernel
            self.again = self.embed

    tied = Tied(nnx.Rngs(0))
    found = paths(tied)
    assert len(found) == 3 and sum(p.endswith("kernel") for p in found) == 1
    assert len(set(read(tied)[0].ids)) == 3
    assert sorted(found) == sorted(".".join(map(str, p)) for p, _ in nnx.to_flat_state(nnx.state(tied)))


def test_lists_and_dicts_of_modules_and_odd_attribute_names():
    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(1, 1, use_bias=False, rngs=rngs) for _ in range(12)])
            names = ["a/b", "a.b", "a[0]", "größe", "名", "with space", "a'b", "", "#2", "line\nbreak"]
            self.by_name = nnx.Dict({n: nnx.Param(jnp.ones(1)) for n in names})
            self.a = nnx.Dict({"b": nnx.Param(jnp.ones(1)), "b.c": nnx.Param(jnp.ones(1))})

    found = paths(Odd(nnx.Rngs(0)))
    assert len(found) == len(set(found)) == 12 + 10 + 2
    assert {f"layers.{i}.kernel" for i in range(12)} <= set(found)
    assert {"by_name.a/b", "by_name.'a.b'", "by_name.größe", "by_name.名", "a.b", "a.'b.c'"} <= set(found)


@pytest.mark.parametrize(
    "source",
    [
        {"a": {"b": 1.0}, "a.b": 2.0},
        {"a": [1.0], "a.0": 2.0, "a[0]": 3.0},
        {"'a.b'": 1.0, "a.b": 2.0},
        collections.OrderedDict([(1, 1.0), ("1", 2.0)]),
        collections.OrderedDict([(1, 1.0), ("1", 2.0), ("1#2", 3.0)]),
        collections.OrderedDict([("1#2", 3.0), (1, 1.0), ("1", 2.0)]),
        {"": 1.0, "value": 2.0},
        {"a": {"": {"b": 1.0}}, "a.": {"b": 2.0}},
        {(1, 2): 1.0, (1, 3): 2.0},
        collections.OrderedDict([(True, 1.0), ("True", 2.0), (None, 3.0), ("None", 4.0)]),
    ],
    ids=range(10),
)
def test_no_two_leaves_share_a_path(source):
    found = paths(source)
    assert len(found) == len(set(found)) == len(jax.tree.leaves(source))


def test_raw_arrays_in_a_module_are_found_too(net):
    net.a.kernel = nnx.data(jnp.ones((3, 4)))
    net.table = nnx.data(np.ones(5))
    tree, _ = read(net)
    kinds = {leaf.path: leaf.kind for leaf in tree.leaves}
    assert kinds["a.kernel"] == kinds["table"] == "array" and kinds["a.bias"] == "Param"


CYCLE = """
import jax.numpy as jnp
from flax import nnx
from nnx_probes.device.leaves import Tree
from nnx_probes.device.probe import Probe

class Node(nnx.Module):
    def __init__(self, rngs):
        self.child = nnx.Linear(2, 3, rngs=rngs)
        self.child.parent = self
        self.raw = nnx.data(jnp.ones(3))

def free_depth(n=0):
    try:
        return free_depth(n + 1)
    except RecursionError:
        return n

node, before = Node(nnx.Rngs(0)), free_depth()
probe = Probe(node)
for _ in range(3):
    probe.enqueue().fetch()
print(sorted(leaf.path for leaf in probe.tree.leaves), probe.tree.version)
late = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
tree = Tree(late)
tree.read()
late.me = late
print(len(tree.read()), [leaf.path for leaf in tree.leaves])
assert before - free_depth() < 10, "the interpreter's recursion counter was left damaged"
print(float(jnp.ones((2, 2)).sum()))
"""


def test_modules_that_point_at_their_parents_are_walked_and_python_survives_it():
    # In a process of its own: jax.tree.flatten on a cycle raises RecursionError and leaves the interpreter's
    # recursion counter used up; catching the error is not enough.
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", CYCLE], cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "['child.bias', 'child.kernel', 'raw'] 1",
        "2 ['bias', 'kernel']",
        "4.0",
    ]


# --- walking once, noticing change --------------------------------------------------------------------------


def test_names_are_worked_out_once_while_the_structure_stays(net, walks):
    tree, _ = read(net)
    first = tree.leaves
    for step in range(10):
        net.a.kernel[...] = net.a.kernel[...] + step
        tree.read()
    assert len(walks) == 1 and tree.leaves is first and tree.version == 1 and tree.replaced == ()


def test_reading_gives_the_newest_arrays(net):
    tree, before = read(net)
    net.a.kernel[...] = net.a.kernel[...] + 1
    at = [leaf.path for leaf in tree.leaves].index("a.kernel")
    after = tree.read()
    assert after[at] is net.a.kernel.get_value() and after[at] is not before[at]


def test_a_getter_of_fresh_pure_states_is_not_walked_again(net, walks):
    tree = Tree(lambda: jax.tree.map(lambda x: x, nnx.to_pure_dict(nnx.state(net))))
    for _ in range(5):
        tree.read()
    assert len(walks) == 1 and tree.version == 1


def test_switching_to_evaluation_and_back_changes_no_leaf_and_no_version(net):
    tree, _ = read(net)
    before = tree.leaves
    net.eval()
    tree.read()
    net.train()
    tree.read()
    assert tree.leaves == before and tree.version == 1


def test_an_attribute_that_counts_changes_no_version(net):
    tree, _ = read(net)
    for step in range(3):
        net.calls = step
        tree.read()
    assert tree.version == 1


def test_a_new_layer_is_noticed(net):
    tree, _ = read(net)
    net.c = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    assert len(tree.read()) == len(tree.leaves) == len(NET) + 2
    assert tree.version == 2 and tree.replaced == ()
    del net.c
    tree.read()
    assert sorted(leaf.path for leaf in tree.leaves) == NET and tree.version == 3


def test_a_replaced_layer_is_named_as_long_as_it_stays_replaced(net):
    tree, _ = read(net)
    old = net.a
    net.a = nnx.Linear(3, 4, rngs=nnx.Rngs(1))
    tree.read()
    assert tree.replaced == ("a.bias", "a.kernel") and tree.version == 1
    tree.read()
    assert tree.replaced == ("a.bias", "a.kernel")
    net.a = old
    tree.read()
    assert tree.replaced == ()


def test_a_leaf_that_has_grown_is_measured_in_its_new_shape(net):
    tree, _ = read(net)
    net.a.kernel.set_value(jnp.ones((3, 5)))
    tree.read()
    assert {leaf.path: leaf.shape for leaf in tree.leaves}["a.kernel"] == (3, 5) and tree.version == 2


def test_a_leaf_that_has_another_dtype_is_told_in_its_new_dtype(net):
    tree, _ = read(net)
    net.a.kernel.set_value(net.a.kernel[...].astype(jnp.bfloat16))
    tree.read()
    assert {leaf.path: leaf.dtype for leaf in tree.leaves}["a.kernel"] == "bfloat16" and tree.version == 2


def test_a_leaf_that_becomes_unmeasurable_is_left_out_and_comes_back():
    source = {"a": 1.0, "b": 2.0}
    tree, _ = read(source)
    source["a"] = "text"
    assert tree.read() == [2.0] and [leaf.path for leaf in tree.leaves] == ["b"]
    source["a"] = 3.0
    assert tree.read() == [3.0, 2.0]


def test_deleted_arrays_are_returned_untouched_and_reported_by_the_probe(net):
    net.a.kernel.get_value().delete()
    probe = Probe(net)
    sample = probe.enqueue().fetch()
    row = [leaf.path for leaf in sample.leaves].index("a.kernel")
    assert sample.unreadable == {"a.kernel": "deleted"} and sample.fingerprints[row] == "deleted"
    assert np.isnan(sample.norm[row]) and sample.nonfinite.sum() == 0 and np.isnan(sample.norm).sum() == 1


def test_tracers_are_reported_by_the_probe_and_nothing_leaks(net):
    seen, samples = [net], []
    probe = Probe(lambda: seen[0])

    @nnx.jit
    def step(model):
        seen[0] = model
        samples.append(probe.enqueue().fetch())
        seen[0] = net
        return model.a.kernel[...].sum()

    with jax.checking_leaks():
        step(net)
    assert set(samples[0].unreadable.values()) == {"traced"} and len(samples[0].unreadable) == len(NET)
    assert probe.enqueue().fetch().unreadable == {}


@pytest.mark.parametrize("fingerprints", ["mix64", "xxh3", None])
def test_a_probe_of_live_arrays_inside_a_compiled_function_is_reported_as_traced(net, fingerprints):
    probe, samples = Probe(net, fingerprints=fingerprints), []

    @jax.jit
    def step(x):
        samples.append(probe.enqueue().fetch())  # the arrays are real, and yet nothing can be run on them here
        return x

    with jax.checking_leaks():
        step(jnp.ones(2))
    assert set(samples[0].unreadable.values()) == {"traced"}
    assert probe.enqueue().fetch().unreadable == {}


def test_a_variable_whose_pytree_grows_or_shrinks_is_noticed():
    class Model(nnx.Module):
        def __init__(self):
            self.cache = nnx.Cache({"a": jnp.ones(2), "b": jnp.ones(3)})
            self.w = nnx.Param(jnp.ones(1))

    model = Model()
    tree, _ = read(model)
    for held in (["a"], ["a", "b", "c"], ["b", "c"], ["b", "d"]):
        model.cache.set_value({name: jnp.ones(2) for name in held})
        assert len(tree.read()) == len(held) + 1
        assert [leaf.path for leaf in tree.leaves] == [*(f"cache.{name}" for name in held), "w"]


def test_a_raw_array_that_joins_a_module_with_a_cycle_moves_no_other_leafs_name():
    class Node(nnx.Module):
        def __init__(self, rngs):
            self.b = nnx.Linear(2, 2, use_bias=False, rngs=rngs)
            self.c = nnx.data(jnp.ones((2, 2)))
            self.b.parent = self

    node = Node(nnx.Rngs(0))
    tree, _ = read(node)
    node.a = nnx.data(jnp.zeros((2, 2)))  # walked before the others
    found = tree.read()
    values = dict(zip((leaf.path for leaf in tree.leaves), found, strict=True))
    assert sorted(values) == ["a", "b.kernel", "c"]
    assert values["a"] is node.a and values["b.kernel"] is node.b.kernel.get_value() and values["c"] is node.c
