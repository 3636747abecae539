"""The rules and facts of a run, from what its header says of them."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nnx_probes.host import rules
from nnx_probes.host.history import Facts
from nnx_probes.host.rule import Rule

__all__ = ["Rebuilt", "facts_of", "rule_of", "rules_of"]

_CLASSES: dict[str, type[Rule]] = {
    name: found for name in rules.__all__ if isinstance(found := getattr(rules, name), type) and issubclass(found, Rule)
}
_NUMBERS = {"inf": math.inf, "nan": math.nan}
"""Numbers whose repr is a name."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What there is to judge with.

    Attributes:
      rules: in the order in which they were asked.
      left_out: (the header's text, reason) of each rule that cannot be made here.
      notes: what had to be assumed, in sentences.
    """

    rules: tuple[Rule, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def rules_of(header: Mapping[str, Any]) -> Rebuilt:
    """Returns the rules a header names."""
    texts = header.get("rules")
    if not isinstance(texts, tuple):
        return Rebuilt(rules.default(), notes=("The file does not name the run's rules: these are the default ones.",))
    found, left_out = [], []
    for text in map(str, texts):
        rule = rule_of(text)
        if isinstance(rule, Rule):
            found.append(rule)
        else:
            left_out.append((text, rule))
    return Rebuilt(tuple(found), tuple(left_out))


def rule_of(text: str) -> Rule | str:
    """Returns the built-in rule that `text`, the repr of a dataclass, stands for; or why there is none.

    Only literal arguments are read; nothing in `text` is run.
    """
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "not a built-in rule"
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in _CLASSES:
        return "not a built-in rule"
    try:
        if call.args:
            raise ValueError("arguments without a name")
        settings = {str(word.arg): ast.literal_eval(_Numbers().visit(word.value)) for word in call.keywords}
        return _CLASSES[call.func.id](**settings)
    except Exception as error:  # of another version, or with a setting that is no literal
        return f"its settings cannot be read ({type(error).__name__}: {error})"


class _Numbers(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(_NUMBERS[node.id]), node) if node.id in _NUMBERS else node


def facts_of(header: Mapping[str, Any]) -> tuple[Facts, tuple[str, ...]]:
    """Returns what was known of the run before its first step, and what had to be assumed."""
    stored = header.get("facts")
    if isinstance(stored, Mapping):
        known = {one.name for one in fields(Facts)}
        return Facts(**{name: value for name, value in stored.items() if name in known}), ()
    settings = header.get("settings")
    total = settings.get("total_steps") if isinstance(settings, Mapping) else None
    facts = Facts(total_steps=total if isinstance(total, int) else None)
    note = "The file does not say what was known before the first step: an unwatched optimizer of this model is assumed"
    return facts, (
        f"{note}{'' if facts.total_steps is None else f', and {total} steps'}. Causes may be ranked otherwise.",
    )
