"""What a `Monitor` can know to be wrong before the first step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
from flax import nnx

from nnx_probes.callbacks.base import Callback, check_every
from nnx_probes.callbacks.optimizer import optimizer_source
from nnx_probes.device.leaves import Tree
from nnx_probes.device.tap import is_watched
from nnx_probes.errors import ArgumentError, ArgumentTypeError, closest
from nnx_probes.host.alert import Level
from nnx_probes.host.history import Facts
from nnx_probes.host.pace import Pace
from nnx_probes.host.rule import Rule

__all__ = [
    "check_model",
    "check_numbers",
    "check_objective",
    "check_optimizer",
    "check_plugins",
    "facts_of",
    "paces_of",
    "resolve",
    "served",
]

OBJECTIVES = ("minimize", "adversarial")

_log = logging.getLogger("nnx_probes")

_SEVERAL = 100
"""The interval that ``every="auto"`` means with several processes."""


def check_numbers(every: Any, budget: Any, total_steps: Any, stop_on: Any) -> None:
    """Raises when one of the plain settings of a monitor cannot work."""
    if every != "auto":
        if every is None:
            raise ArgumentTypeError("Monitor(every=None): expected a whole number of steps or 'auto'.")
        check_every(every, "Monitor")
    if not isinstance(budget, (int, float)) or not 0 < budget <= 1:
        raise ArgumentError(f"Monitor(budget={budget!r}): expected a share of loop time, above 0 and at most 1.")
    if total_steps is not None:
        if isinstance(total_steps, bool) or not isinstance(total_steps, int):
            raise ArgumentTypeError(f"Monitor(total_steps={total_steps!r}): expected a whole number of steps or None.")
        if total_steps < 1:
            raise ArgumentError(f"Monitor(total_steps={total_steps}): expected at least 1 step.")
    if stop_on is not None and not isinstance(stop_on, Level):
        names = [f"Level.{level.name}" for level in Level]
        hint = closest(f"Level.{str(stop_on).upper()}", names)
        raise ArgumentTypeError(f"Monitor(stop_on={stop_on!r}): expected one of {', '.join(names)} or None.{hint}")


def check_objective(objective: Any) -> None:
    """Raises for an unknown objective."""
    if objective not in OBJECTIVES:
        raise ArgumentError(
            f"Monitor(objective={objective!r}): expected one of {OBJECTIVES}.{closest(str(objective), OBJECTIVES)}"
        )


def resolve(source: Any) -> Any:
    """Returns the object itself, or what it returns when it is a getter."""
    return source() if callable(source) and not isinstance(source, nnx.Pytree) else source


def check_model(model: Any) -> None:
    """Raises unless `model` holds arrays that can be measured now."""
    if model is None:
        return
    if isinstance(model, type):
        raise ArgumentTypeError(
            f"Monitor(model={model.__name__}) got the class: expected an instance, for example {model.__name__}(rngs=...)."
        )
    tree = Tree(model)
    arrays = tree.read()
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        raise ArgumentError("Monitor(model=...) was built inside a compiled function: build it in the Python loop.")
    gone = [
        leaf.path for leaf, x in zip(tree.leaves, arrays, strict=True) if isinstance(x, jax.Array) and x.is_deleted()
    ]
    if gone:
        raise ArgumentError(
            f"Monitor(model=...): {len(gone)} of {len(arrays)} arrays are deleted, first {gone[0]!r}: they were donated to a "
            "compiled step. Pass the object that holds the step's results."
        )
    variables = [leaf.variable for leaf in tree.leaves if leaf.variable is not None]
    if isinstance(model, nnx.Pytree) and not any(issubclass(v, nnx.Param) for v in variables):
        kinds = ", ".join(sorted({leaf.kind for leaf in tree.leaves}))
        raise ArgumentError(
            f"Monitor(model={type(model).__name__}): the model has no nnx.Param, only {kinds}. Wrap the arrays that should "
            "train in nnx.Param(...)."
        )


def check_optimizer(optimizer: Any, model: Any) -> None:
    """Raises when `optimizer` keeps state, and none of it has the shape of anything in `model`."""
    if optimizer is None:
        return
    tree = Tree(optimizer_source(resolve(optimizer)), may_be_empty=True)
    tree.read()
    if model is None or not isinstance(resolve(optimizer), nnx.Optimizer):
        return
    own = [leaf for leaf in tree.leaves if leaf.kind == "OptVariable" and leaf.shape]
    other = Tree(model)
    other.read()
    shapes = {leaf.shape for leaf in other.leaves}
    if own and not any(leaf.shape in shapes for leaf in own):
        raise ArgumentError(
            f"Monitor(optimizer=...): the optimizer keeps state for another model: its {own[0].path!r} has shape "
            f"{own[0].shape}, and no leaf of the {type(model).__name__} has the shape of any of its {len(own)} leaves. Pass "
            "the optimizer that was built from this model."
        )


def facts_of(model: Any, optimizer: Any, total_steps: int | None, objective: str) -> Facts:
    """Returns what rules may know before the first step."""
    held = vars(optimizer).get("model") if isinstance(optimizer, nnx.Optimizer) else None
    return Facts(
        total_steps=total_steps,
        watched=is_watched(optimizer),
        other_model=held is not None and model is not None and held is not model,
        has_optimizer=optimizer is not None,
        objective=objective,
    )


def check_plugins(
    callbacks: Iterable[Any], rules: Iterable[Any] | None
) -> tuple[tuple[Callback, ...], tuple[Rule, ...]]:
    """Returns both as tuples; raises when one is no callback or no rule, or a rule reads what nothing provides."""
    chosen = tuple(callbacks)
    for callback in chosen:
        if isinstance(callback, type) or not isinstance(callback, Callback):
            raise ArgumentTypeError(
                f"callbacks: {callback!r} is no Callback. Pass instances of (subclasses of) Callback."
            )
        check_every(callback.every, type(callback).__name__)
    names = provided(chosen)
    wanted = tuple(rules or ())
    for rule in wanted:
        if isinstance(rule, type) or not isinstance(rule, Rule):
            raise ArgumentTypeError(f"rules: {rule!r} is no Rule. Pass instances, for example rules.Nonfinite().")
        if not rule.slug:
            raise ArgumentError(
                f"rules: {type(rule).__name__} has no slug. Give it a class attribute slug = 'my_rule'."
            )
        for name in rule.reads:
            if not _is_provided(name, names) and not rule.optional:
                raise ArgumentError(
                    f"rules: {rule.slug!r} reads {name!r}, which no callback provides. Provided are "
                    f"{sorted(names)}.{closest(name, names)} Name it in the callback's `provides`."
                )
    return chosen, wanted


def served(rules: Sequence[Rule], callbacks: Sequence[Callback]) -> tuple[Rule, ...]:
    """Returns the rules of the default set that these callbacks can serve."""
    names = provided(callbacks)
    return tuple(rule for rule in rules if all(_is_provided(name, names) for name in rule.reads))


def provided(callbacks: Sequence[Callback]) -> set[str]:
    """Returns all names (and ``group.*`` patterns) that get into records: by the callbacks, or by ``monitor.on_eval``."""
    return {"eval.*"} | {name for callback in callbacks for name in callback.provides}


def _is_provided(name: str, names: set[str]) -> bool:
    return name in names or f"{name.split('.', 1)[0]}.*" in names


def paces_of(every: int | Literal["auto"], budget: float, callbacks: Sequence[Callback]) -> tuple[Pace, list[Pace]]:
    """Returns the monitor's own pace and that of each callback; those that find their interval share the budget."""
    shared = every == "auto" and any(callback.every is None for callback in callbacks)
    searching = shared + sum(callback.every == "auto" for callback in callbacks)
    part = budget / max(1, searching)
    own = _pace(every, part)
    return own, [own if callback.every is None else _pace(callback.every, part) for callback in callbacks]


def _pace(every: int | Literal["auto"], budget: float) -> Pace:
    if every != "auto":
        return Pace(every)
    if jax.process_count() == 1:
        return Pace.auto(budget)
    # Each process would find an interval of its own, and a probe that not all of them join never ends.
    _log.warning("every='auto' with %d processes: probing every %d steps", jax.process_count(), _SEVERAL)
    return Pace(_SEVERAL)
