"""One forward pass with every module's output and every activation function measured.

Module outputs come from ``nnx.capture``; what lies between modules (``nnx.relu(self.hidden(x))``) is read off the traced
program, which also gives the order in which things run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from nnx_probes.device.leaves import Rest, dotted, key_name, split_arrays
from nnx_probes.device.reduce import apart, count_nonfinite, plain

__all__ = ["RECTIFIERS", "Forward", "Place", "read_places"]

RECTIFIERS = ("relu", "relu6", "max(x, 0)")
_BOUNDED = {
    "sigmoid": (0.0, 1.0),
    "logistic": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "hard_tanh": (-1.0, 1.0),
    "hard_sigmoid": (0.0, 1.0),
}
"""Activation functions that level off -> the two values they approach."""
_NAMED = (*RECTIFIERS, *_BOUNDED, "gelu", "silu", "swish", "elu", "selu", "leaky_relu", "softplus", "softmax", "celu")
_EDGE = 0.01
"""A sigmoid or tanh within this share of its range from an end counts as saturated."""
_STATS = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere in the forward pass.

    Attributes:
      path: of the module (``"layers.0.lin"``), or of the last module before an activation function
        (``"hidden > relu"``).
      shape, dtype: of the array.
      function: name of the activation function, ``""`` for a module's output.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    function: str = ""

    @property
    def units(self) -> int:
        """Length of the last axis, 0 where there is no other one."""
        return self.shape[-1] if len(self.shape) >= 2 else 0


class Forward:
    """Runs and measures `forward`; compiles once a structure of model and batch.

    Args:
      forward: of the model and a batch; what it returns is not looked at.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = _unjitted(forward)
        self._places: dict[Any, tuple[Place, ...]] = {}
        self._program = jax.jit(self._measure, static_argnums=(0, 1))

    def enqueue(self, model: Any, batch: Any, kept: Any = None) -> tuple[tuple[Place, ...], jax.Array]:
        """Queues one forward pass; changes nothing of the model (not even its random state).

        Args:
          model: the live model.
          batch: what `forward` gets.
          kept: what `keep` returned before the step, to run on the parameters of then.

        Returns:
          The places in the order in which they are computed, and uint8[k] for `read_places`.
        """
        graphdef, pure = _split(model) if kept is None else kept
        arrays, others = split_arrays(batch)
        packed: jax.Array = self._program(graphdef, others, pure, arrays)
        key = (graphdef, others, _signature(pure), _signature(arrays))
        if key not in self._places:  # the program was compiled before, for other objects of the same structure
            self._places[key] = self._latest
        return self._places[key], packed

    def keep(self, model: Any) -> Any:
        """Returns the model's structure and a copy of its arrays: the step may have its own donated."""
        graphdef, pure = _split(model)
        return graphdef, _copy(pure)

    def _measure(self, graphdef: Any, others: Rest, state: Any, batch: list[Any]) -> jax.Array:
        def run(state: Any, arrays: list[Any]) -> dict[str, list[Any]]:
            batch = others.join(arrays)
            model = nnx.merge(graphdef, state)
            capture = nnx.capture(_call(self._forward), nnx.Intermediate, method_outputs=nnx.Intermediate)
            _, captured = capture(model, batch)
            return _by_path(nnx.as_pure(captured))

        traced, shapes = jax.make_jaxpr(run, return_shape=True)(state, batch)
        names = [path for path, xs in shapes.items() for _ in xs]
        places, variables = _in_order(traced.jaxpr, names)
        self._latest = self._places[(graphdef, others, _signature(state), _signature(batch))] = places
        jaxpr = traced.jaxpr.replace(outvars=variables, debug_info=_no_names(traced.jaxpr, len(variables)))
        arrays = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, traced.consts))(*jax.tree.leaves((state, batch)))
        with jax.named_scope("nnx_probes"):
            stats = [_statistics(x, place) for x, place in zip(arrays, places, strict=True)]
            alive = [_alive(x) for x, place in zip(arrays, places, strict=True) if place.units]
            numbers = jnp.stack(stats) if stats else jnp.zeros((0, _STATS), jnp.float32)
            words = jax.lax.bitcast_convert_type(numbers, jnp.uint8).reshape(-1)
            return jnp.concatenate([words, *(jnp.packbits(a) for a in alive)])


@jax.jit
def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _split(model: Any) -> tuple[Any, Any]:
    graphdef, state = nnx.split(model)
    return graphdef, nnx.as_pure(state)


def read_places(places: tuple[Place, ...], packed: np.ndarray) -> tuple[dict[str, np.ndarray], list[np.ndarray | None]]:
    """Returns (name -> float32[n_places] of ``rms``, ``max_abs``, ``nonfinite``, ``saturated``; who is alive).

    The second has one bool[units] a place, whether each unit was other than 0 on any sample; None for places without units.
    """
    raw = np.asarray(packed, np.uint8)
    head = len(places) * _STATS * 4
    numbers = raw[:head].view(np.float32).reshape(len(places), _STATS)
    alive: list[np.ndarray | None] = []
    at = head
    for place in places:
        size = (place.units + 7) // 8
        alive.append(np.unpackbits(raw[at : at + size], count=place.units).astype(bool) if place.units else None)
        at += size
    names = ("rms", "max_abs", "nonfinite", "saturated")
    return {name: numbers[:, i].copy() for i, name in enumerate(names)}, alive


def _unjitted(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function under nnx.jit or jax.jit: behind a call the activation functions would not show."""
    jitted = isinstance(forward, type(jax.jit(len))) or type(forward).__module__.startswith("flax.nnx.transforms")
    inner: Callable[..., Any] = getattr(forward, "__wrapped__", forward) if jitted else forward
    return inner


def _call(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, batch: forward(model, batch)  # nnx.capture looks for a module in a function's first argument


def _by_path(captured: Any) -> dict[str, list[Any]]:
    """Module path -> the floating arrays it returned, call after call."""
    found: dict[str, list[Any]] = {}
    for keys, x in jax.tree_util.tree_flatten_with_path(captured)[0]:
        if not (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)):
            continue
        parts = [key_name(key) for key in keys]
        at = next(
            (i for i, part in enumerate(parts) if isinstance(part, str) and _is_method(part, parts, i)), len(parts)
        )
        method = parts[at] if at < len(parts) else "__call__"
        path = dotted(parts[:at])  # "" for the model itself
        found.setdefault(path if method == "__call__" else f"{path}.{method}()", []).append(x)
    return found


def _is_method(part: str, parts: list[Any], i: int) -> bool:
    """Whether `part` is the method's name: what follows are the numbers of the calls and of the outputs."""
    return part == "__call__" or all(not isinstance(p, str) for p in parts[i + 1 :])


def _in_order(jaxpr: Any, names: list[str]) -> tuple[tuple[Place, ...], list[Any]]:
    """The places of a traced program and their variables, in the order in which they are computed."""
    outputs: dict[Any, list[str]] = {}
    for variable, name in zip(jaxpr.outvars, names, strict=True):
        if not isinstance(variable, core.Literal):
            outputs.setdefault(variable, []).append(name)
    places: list[Place] = []
    variables: list[Any] = []
    seen: dict[str, int] = {}
    last = "input"

    def note(name: str, variable: Any, function: str = "") -> None:
        seen[name] = seen.get(name, 0) + 1
        path = name if seen[name] == 1 else f"{name}#{seen[name]}"
        places.append(Place(path, tuple(variable.aval.shape), str(variable.aval.dtype), function))
        variables.append(variable)

    for variable in jaxpr.invars:
        for name in outputs.get(variable, ()):
            note(_shown(name), variable)
    inside_gelu = {v for eqn in jaxpr.eqns if _adds_one(eqn) for v in eqn.invars if not isinstance(v, core.Literal)}
    for eqn in jaxpr.eqns:
        function, result = _function(eqn), eqn.outvars[0] if len(eqn.outvars) == 1 else None
        if function and result not in inside_gelu and result is not None and _is_activation(result.aval):
            note(f"{last} > {function}", result, function)
        results = [(m, -_depth(name), name, v) for v, m in _moments(eqn) for name in outputs.get(v, ())]
        for _, _, name, variable in sorted(results, key=lambda r: r[:2]):  # of one moment the innermost module first
            last = _shown(name)
            note(last, variable)
    return tuple(places), variables


def _moments(eqn: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Each result of an equation with its place in the order of computation inside it (of a scan, a remat, a jit)."""
    inner = [p for p in map(_as_jaxpr, eqn.params.values()) if p is not None and len(p.outvars) == len(eqn.outvars)]
    if len(inner) != 1:
        return [(v, ()) for v in eqn.outvars]
    when: dict[Any, tuple[int, ...]] = {}
    for i, e in enumerate(inner[0].eqns):
        when.update({v: (i, *moment) for v, moment in _moments(e)})
    pairs = zip(eqn.outvars, inner[0].outvars, strict=True)
    return [(v, (-1,) if isinstance(x, core.Literal) else when.get(x, (-1,))) for v, x in pairs]


def _as_jaxpr(value: Any) -> Any:
    jaxpr = getattr(value, "jaxpr", value)
    return jaxpr if hasattr(jaxpr, "eqns") and hasattr(jaxpr, "outvars") else None


def _depth(name: str) -> int:
    """How many modules lie around the one of this path."""
    return 0 if not name or name.startswith(".") else name.count(".") + 1


def _shown(name: str) -> str:
    return f"model{name}" if not name or name.startswith(".") else name


def _is_activation(aval: Any) -> bool:
    """Whether it can be one: floating, with an axis of samples (not, for example, a variance that is kept above 0)."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact)) and len(aval.shape) >= 2


def _adds_one(eqn: Any) -> bool:
    return eqn.primitive.name == "add" and any(
        isinstance(v, core.Literal) and np.all(np.asarray(v.val) == 1) for v in eqn.invars
    )


def _function(eqn: Any) -> str:
    """The name of the activation function that an equation computes, ``""`` if it computes something else."""
    name = eqn.primitive.name
    if name == "max" and any(isinstance(v, core.Literal) and np.all(np.asarray(v.val) == 0) for v in eqn.invars):
        return "max(x, 0)"
    if name in _NAMED:
        return str(name)
    inner = str(eqn.params.get("name", ""))
    if inner in _NAMED:
        return inner
    called = eqn.params.get("call_jaxpr")  # custom_jvp_call, which jax.nn.relu is wrapped in
    inside: list[Any] = called.jaxpr.eqns if called is not None and hasattr(called, "jaxpr") else []
    return _function(inside[0]) if len(inside) == 1 else ""


def _statistics(x: jax.Array, place: Place) -> jax.Array:
    wide = plain(apart(x)).astype(jnp.float32)
    count = max(x.size, 1)
    largest = jnp.max(jnp.abs(wide), initial=0)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    rms = jnp.sqrt(jnp.sum((wide / scale) ** 2) / count) * scale
    saturated = jnp.float32(jnp.nan)
    if place.function in _BOUNDED:
        low, high = _BOUNDED[place.function]
        edge = _EDGE * (high - low)
        saturated = jnp.mean(((wide < low + edge) | (wide > high - edge)).astype(jnp.float32))
    return jnp.stack([rms, largest, count_nonfinite(x).astype(jnp.float32), saturated])


def _alive(x: jax.Array) -> jax.Array:
    return jnp.any(x != 0, axis=tuple(range(x.ndim - 1)))


def _signature(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(x), str(jax.typeof(x).dtype)) for x in leaves)  # dtype as jax narrows it


def _no_names(jaxpr: Any, n: int) -> Any:
    """Debug information that fits another number of results."""
    return jaxpr.debug_info._replace(result_paths=tuple("" for _ in range(n)))
