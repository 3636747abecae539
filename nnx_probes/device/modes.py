"""Which layers behave otherwise in training than in evaluation, and how they are set now."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from flax import nnx

from nnx_probes.device.leaves import dotted
from nnx_probes.device.same import Same

__all__ = ["Modes", "Switch"]

_READS = 64
"""After so many reads the model is walked again, for a module may have been put in another's place."""


@dataclass(frozen=True, slots=True)
class Switch:
    """One layer that can be switched.

    Attributes:
      path: of the module.
      dropout: whether it drops units (False: it normalises with running statistics).
      evaluating: whether it is set to evaluation.
    """

    path: str
    dropout: bool
    evaluating: bool


class Modes:
    """Finds the layers with ``deterministic`` (and a rate above 0) or ``use_running_average`` of one model.

    It goes by the attributes, so that a user's own layers count; one that leaves the choice to its caller (None) does not.
    """

    def __init__(self) -> None:
        self._model = Same()
        self._found: list[tuple[str, str, weakref.ref[Any]]] = []
        self._reads = 0

    def read(self, model: Any) -> list[Switch] | None:
        """Returns the switches of `model` in the order of their paths; None if it is no Module.

        Cost: a few attributes a layer; one walk over the modules at the first read and at every 64th.
        """
        if not isinstance(model, nnx.Module):
            return None
        modules = [ref() for _, _, ref in self._found]
        self._reads += 1
        other = self._model.turn_to(model)
        if other or self._reads > _READS or any(m is None for m in modules):
            self._walk(model)
            modules = [ref() for _, _, ref in self._found]
        found = []
        for (path, name, _), module in zip(self._found, modules, strict=True):
            value = getattr(module, name, None)
            if isinstance(value, bool):
                found.append(Switch(path, name == "deterministic", value))
        return found

    def _walk(self, model: Any) -> None:
        self._reads, self._found = 0, []
        for path, module in nnx.iter_modules(model):
            own = vars(module)
            name = "use_running_average" if "use_running_average" in own else "deterministic"
            rate = own.get("rate", own.get("dropout_rate", 0.0))
            if name in own and (name != "deterministic" or (isinstance(rate, (int, float)) and rate > 0)):
                self._found.append((dotted(path) or "model", name, weakref.ref(module)))
        self._found.sort(key=lambda entry: entry[0])
