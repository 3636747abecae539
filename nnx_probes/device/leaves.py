"""Which arrays a model, an optimizer or any pytree holds, and what each is called.

A `Tree` is built once from whatever the user trains. Reading it gives the current arrays as a flat list:
that list, never the Module, goes into the compiled programs (a Module would re-trace on ``eval()``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_probes.errors import ArgumentTypeError

__all__ = ["Leaf", "Rest", "Tree", "dotted", "is_array", "key_name", "objects", "reaches", "split_arrays"]

_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The name and the static facts of one array.

    Attributes:
      path: dotted, for example ``"layers.0.attn.q.kernel"``; a part that itself holds a dot is quoted.
      parts: the same as a tuple, as NNX filters take it.
      kind: name of the Variable's type, ``"array"`` for arrays outside any Variable.
      variable: the Variable's type, None for arrays outside any.
      shape, dtype: of the array when the tree was walked.
    """

    path: str
    parts: tuple[Any, ...]
    kind: str
    variable: type | None
    shape: tuple[int, ...]
    dtype: str


def is_array(value: Any) -> bool:
    """Whether `value` is something that can be measured (device or host array, number)."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype == np.bool_ or bool(jax.dtypes.issubdtype(value.dtype, np.number))
    return isinstance(value, (jax.Array, *_NUMBERS))


_VARIABLES: dict[type, bool | None] = {}
"""Whether a type is a Variable's: asked for each object of a model at each read, and NNX's own check runs Python code.
None for tracers and the Variables of jax's extensible types, where it depends on the object."""
_INNER: dict[type, bool] = {}
"""Whether objects of a type have children."""


def _is_variable(value: Any) -> bool:
    kind = type(value)
    if kind not in _VARIABLES:
        depends = issubclass(kind, jax.core.Tracer) or kind.__name__ == "HijaxVariable"
        _VARIABLES[kind] = None if depends else issubclass(kind, nnx.Variable)
    known = _VARIABLES[kind]
    return isinstance(value, nnx.Variable) if known is None else known


def _is_inner(value: Any) -> bool:
    kind = type(value)
    if kind not in _INNER:
        _INNER[kind] = issubclass(kind, (nnx.Pytree, Mapping, list, tuple))
    return _INNER[kind]


def key_name(key: Any) -> Any:
    """Returns the plain name or index in one of jax's path keys."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def dotted(parts: Sequence[Any]) -> str:
    """Returns a path as one text; a part that itself holds a dot is quoted."""
    return ".".join(repr(p) if isinstance(p, str) and "." in p else str(p) for p in parts)


class Tree:
    """A source of arrays: Module, Optimizer, State, dict, any pytree, or a function that returns one.

    The names are worked out on the first read and again only when the structure has changed. A Variable
    reached over several paths (tied weights) counts once, under its first path.

    Args:
      source: the live object, or a zero-argument function for loops that carry their state (called on
        every read; it should return the newest state).
      may_be_empty: whether a source without arrays is fine (optimizers without state).

    Attributes:
      leaves: names of the arrays of the last read, in its order.
      version: goes up by one whenever `leaves` changed.
      replaced: paths under which the last read found another Variable object than the first one did.

    Cost of a read: one flattening of the pytree (about 4 ms for 770 leaves on one core), no array is
    touched.
    """

    def __init__(self, source: Any, *, may_be_empty: bool = False) -> None:
        self._may_be_empty = may_be_empty
        self._getter: Callable[[], Any] | None = None
        if callable(source) and not isinstance(source, nnx.Pytree):
            self._getter = source
        self._source = source
        self._structure: Any = None
        self._no_arrays: tuple[tuple[int, Any], ...] = ()
        self._pick: tuple[tuple[int, int | None], ...] = ()
        self._specs: tuple[tuple[tuple[int, ...], Any], ...] = ()
        self._first: dict[str, int] = {}
        self._now: list[int] = []
        self.leaves: tuple[Leaf, ...] = ()
        self.version = 0
        self.replaced: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """``id`` of the object behind each leaf (the Variable, or the array itself) at the last read."""
        return tuple(self._now)

    @property
    def source(self) -> Any:
        """The object itself (what the getter returns, if there is one)."""
        return self._getter() if self._getter is not None else self._source

    def read(self) -> list[Any]:
        """Returns the current arrays, one for each entry of `leaves`.

        Raises:
          ArgumentTypeError: the source holds no array at all.
        """
        source = self.source
        cyclic = _has_cycle(source)
        found, structure = _flatten(source, cyclic)
        if (
            self._structure is None
            or structure != self._structure
            or any(_inside(found[at]) != inner for at, inner in self._no_arrays)
        ):
            self._name(source, found, structure, cyclic)
        values = self._values(found)
        if not all(map(_fits, values, self._specs)):  # same structure, but a leaf has grown or changed its type
            self._name(source, found, structure, cyclic)
            values = self._values(found)
        self._note_replaced(found)
        return values

    def _values(self, found: list[Any]) -> list[Any]:
        return [
            _value(found[at]) if inner is None else jax.tree.leaves(_value(found[at]))[inner]
            for at, inner in self._pick
        ]

    def _name(self, source: Any, found: list[Any], structure: Any, cyclic: bool) -> None:
        leaves: list[Leaf] = []
        pick: list[tuple[int, int | None]] = []
        seen: set[int] = set()
        used: set[str] = set()
        for at, (parts, item) in enumerate(zip(_paths(source, cyclic), found, strict=True)):
            if id(item) in seen:
                continue
            variable = getattr(item, "var_type", type(item)) if _is_variable(item) else None
            if variable is not None:
                seen.add(id(item))
            for inner, deeper, value in _arrays(item):
                path = _unused(dotted((*parts, *deeper)) or "value", used)
                kind = variable.__name__ if variable is not None else "array"
                shape = tuple(getattr(value, "shape", ()))
                leaves.append(Leaf(path, (*parts, *deeper), kind, variable, shape, _dtype(value)))
                pick.append((at, inner))
        if not leaves and not self._may_be_empty:
            raise ArgumentTypeError(
                f"found no array in the {type(source).__name__}: expected a Module, an Optimizer, a State, a pytree "
                "of arrays, or a function without arguments that returns one. Pass the object that your training "
                "step changes."
            )
        self._pick, self._structure, self._now = tuple(pick), structure, []
        self._specs = tuple((tuple(getattr(x, "shape", ())), _type(x)) for x in self._values(found))
        self._no_arrays = tuple((at, _inside(x)) for at, x in enumerate(found) if not is_array(_value(x)))
        if tuple(leaves) != self.leaves or not self.version:  # eval() changes the structure and no name
            self.leaves = tuple(leaves)
            self.version += 1

    def _note_replaced(self, found: list[Any]) -> None:
        now = [id(found[at]) for at, _ in self._pick]
        if now == self._now:
            return
        self._now = now
        by_path = {leaf.path: i for leaf, i in zip(self.leaves, now, strict=True) if leaf.variable is not None}
        self._first = self._first or by_path
        self.replaced = tuple(path for path, i in by_path.items() if self._first.get(path, i) != i)


def objects(source: Any) -> tuple[list[Any], Any]:
    """Returns the Variables and other leaves of `source`, one for each path, and a structure to compare with another one."""
    return _flatten(source, _has_cycle(source))


def _flatten(source: Any, cyclic: bool) -> tuple[list[Any], Any]:
    if not cyclic:
        found, structure = jax.tree.flatten(source, is_leaf=_is_variable)
        return found, structure
    walked = list(_walk_graph(source))
    return [node for _, node in walked], tuple((path, id(node) if _is_variable(node) else 0) for path, node in walked)


def _paths(source: Any, cyclic: bool) -> list[tuple[Any, ...]]:
    if not cyclic:
        found, _ = jax.tree_util.tree_flatten_with_path(source, is_leaf=_is_variable)
        return [tuple(key_name(key) for key in keys) for keys, _ in found]
    return [path for path, _ in _walk_graph(source)]


def _walk_graph(source: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for path, node in nnx.iter_graph(source):
        if _is_variable(node) or isinstance(node, (jax.Array, np.ndarray)):
            yield tuple(path), node


def _has_cycle(source: Any) -> bool:
    """Whether a module can be reached from itself (children that point at their parents).

    jax's own flattening would recurse until Python gives up, and the interpreter's recursion counter with it.
    """
    above: set[int] = set()
    done: set[int] = set()
    stack: list[tuple[Any, bool]] = [(source, False)]
    while stack:
        node, leaving = stack.pop()
        me = id(node)
        if leaving:
            above.discard(me)
            done.add(me)
        elif me in above:
            return True
        elif me not in done:
            children = [child for child in _children(node) if _is_inner(child)]
            if children:
                above.add(me)
                stack.append((node, True))
                stack += [(child, False) for child in children]
            else:
                done.add(me)
    return False


def reaches(root: Any, target: Any) -> bool:
    """Whether the very object `target` lies in `root`: a module, a container, or both nested."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node is target:
            return True
        if id(node) not in seen:
            seen.add(id(node))
            stack.extend(_children(node))
    return False


@dataclass(frozen=True, slots=True)
class Rest:
    """What is no array in a pytree, and its structure: hashable where those things are, for ``static_argnums``."""

    structure: Any
    others: tuple[tuple[int, Any], ...]

    def join(self, arrays: Sequence[Any]) -> Any:
        """Returns the pytree with these arrays in their places."""
        leaves, others = iter(arrays), dict(self.others)
        return self.structure.unflatten(
            [others[i] if i in others else next(leaves) for i in range(self.structure.num_leaves)]
        )


def split_arrays(tree: Any) -> tuple[list[Any], Rest]:
    """Returns the arrays in `tree` and the rest of it (texts and other objects that no compiled function takes)."""
    leaves, structure = jax.tree.flatten(tree)
    others = tuple((i, x) for i, x in enumerate(leaves) if not is_array(x))
    return [x for x in leaves if is_array(x)], Rest(structure, others)


def _children(node: Any) -> list[Any]:
    if not _is_inner(node):
        return []
    if isinstance(node, nnx.Pytree):
        return list(vars(node).values())
    if isinstance(node, Mapping):
        return list(node.values())
    return list(node) if isinstance(node, (list, tuple)) else []


def _arrays(item: Any) -> Iterator[tuple[int | None, tuple[Any, ...], Any]]:
    """The arrays in one found item: (index within a Variable's pytree, deeper path, array)."""
    value = _value(item)
    if is_array(value):
        yield None, (), value
    elif _is_variable(item):
        found, _ = jax.tree_util.tree_flatten_with_path(value)
        for inner, (keys, leaf) in enumerate(found):
            if is_array(leaf):
                yield inner, tuple(key_name(key) for key in keys), leaf


def _inside(item: Any) -> Any:
    """What must stay the same about an item that is no array: the structure of the pytree a Variable holds."""
    value = _value(item)
    return is_array(value), jax.tree.structure(value)


def _unused(path: str, used: set[str]) -> str:
    """`path`, or with a number behind it where two keys read the same ({1: ..., "1": ...})."""
    chosen, count = path, 1
    while chosen in used:
        count += 1
        chosen = f"{path}#{count}"
    used.add(chosen)
    return chosen


def _dtype(value: Any) -> str:
    return str(getattr(value, "dtype", type(value).__name__))


def _fits(value: Any, spec: tuple[tuple[int, ...], Any]) -> bool:
    return getattr(value, "shape", ()) == spec[0] and _type(value) == spec[1] and is_array(value)


def _type(value: Any) -> Any:
    """What `_dtype` gives the name of; comparing it is ten times cheaper than comparing names."""
    return getattr(value, "dtype", type(value))


def _value(item: Any) -> Any:
    if not _is_variable(item):
        return item
    value = item.get_raw_value()  # 70 times cheaper than get_value(), which checks trace levels
    return value if is_array(value) else item.get_value()
