"""Looking over an optimizer's shoulder: what goes into its transformation during one ``update``, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from nnx_probes.device.flow import Layout
from nnx_probes.device.leaves import dotted, key_name

__all__ = ["Seen", "add_note", "handed", "spying"]


class Seen:
    """What the transformation was given and what it returned."""

    def __init__(self) -> None:
        self.grads: list[Any] | None = None
        self.params: list[Any] | None = None
        self.updates: list[Any] | None = None
        self._where: Any = get_opaque_trace_state()

    def note(self, grads: Any, params: Any, updates: Any) -> None:
        """Takes note of one call, unless it runs deeper inside (a branch of the optimizer's own): its arrays stay there."""
        if self._where == get_opaque_trace_state():
            self.grads, self.updates = jax.tree.leaves(grads), jax.tree.leaves(updates)
            self.params = None if params is None else jax.tree.leaves(params)

    def usable(self, layout: Layout) -> bool:
        """Whether there are gradients, and all there is fits the parameters that were there at `watch`."""
        return self.grads is not None and all(
            xs is None or layout.fits(xs) for xs in (self.grads, self.params, self.updates)
        )


class _Spy:
    """Stands in for the transformation during one ``update``."""

    def __init__(self, tx: Any, seen: Seen) -> None:
        self._tx = tx
        self._seen = seen

    def __eq__(self, other: object) -> bool:  # an optimizer whose own update is an nnx.jit function compiles it by this
        return isinstance(other, _Spy) and bool(self._tx == other._tx)

    def __hash__(self) -> int:
        return hash((_Spy, self._tx))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        result = self._tx.update(updates, state, params, **extra)
        self._seen.note(updates, params, result[0])
        return result


def handed(optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Seen:
    """The gradients as ``update`` got them, and the parameters as they are now."""
    seen = Seen()
    args = (*args, kwargs["grads"]) if "grads" in kwargs else args
    model, grads = args if len(args) == 2 else (getattr(optimizer, "model", None), args[0] if args else None)
    if isinstance(model, nnx.Pytree) and isinstance(grads, (nnx.Pytree, nnx.State)):
        seen.grads, seen.params = (_leaves(optimizer, x) for x in (grads, model))
    return seen


def _leaves(optimizer: Any, tree: Any) -> list[Any]:
    return jax.tree.leaves(nnx.as_pure(nnx.state(tree, optimizer.wrt, graph=getattr(optimizer, "graph", None))))


def add_note(error: Exception, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Says which parameters have no gradient, where that is what `error` is about: flax names no leaf."""
    args = (*args, kwargs["grads"]) if "grads" in kwargs else args
    model, grads = args if len(args) == 2 else (getattr(optimizer, "model", None), args[0] if args else None)
    own = {path for path, _ in nnx.to_flat_state(nnx.state(model, optimizer.wrt))}
    got = {tuple(map(key_name, keys)) for keys, _ in jax.tree_util.tree_flatten_with_path(nnx.as_pure(grads))[0]}
    missing = sorted(dotted(path) for path in own - got)
    if missing:
        wrt = getattr(optimizer.wrt, "__name__", repr(optimizer.wrt))
        error.add_note(
            f"nnx_probes: the gradients hold no entry for {len(missing)} of the {len(own)} parameters that wrt={wrt} selects, "
            f"first {missing[0]!r}. Pass what nnx.grad(loss, argnums=nnx.DiffState(0, {wrt})) returns for this model."
        )


@contextmanager
def spying(optimizer: Any) -> Iterator[Seen]:
    """Yields what will have been seen of the transformation by the end of the block."""
    attributes, seen = vars(optimizer), Seen()
    original = attributes["tx"]
    attributes["tx"] = _Spy(original, seen)
    try:
        yield seen
    finally:
        attributes["tx"] = original
