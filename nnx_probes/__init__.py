"""Tells what is wrong with a Flax NNX training run, from inside your own loop.

    import nnx_probes as probes

    with probes.Monitor("runs/a", model=model, optimizer=optimizer) as monitor:
        for step, batch in enumerate(batches):
            loss = train_step(model, optimizer, batch)
            monitor(step, loss=loss, batch=batch)

Names are looked up on first use: importing the package imports neither jax nor numpy, so that reading
a stored run or asking for ``nnx-probes --help`` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_probes import callbacks, writers
    from nnx_probes.callbacks.activations import ActivationProbe
    from nnx_probes.callbacks.base import Callback
    from nnx_probes.callbacks.grads import GradientProbe
    from nnx_probes.callbacks.loss import LossProbe
    from nnx_probes.callbacks.optimizer import OptimizerProbe
    from nnx_probes.callbacks.params import ParamProbe
    from nnx_probes.device.fingerprint import fingerprint
    from nnx_probes.device.stats import step_stats
    from nnx_probes.device.tap import ProbeState, watch
    from nnx_probes.host import rules
    from nnx_probes.host.alert import Alert, Cause, Level
    from nnx_probes.host.history import History
    from nnx_probes.host.record import Record
    from nnx_probes.host.rule import Rule
    from nnx_probes.loop import fit
    from nnx_probes.monitor import Monitor
    from nnx_probes.tuning import tune
    from nnx_probes.writers.base import Writer

__all__ = [
    "ActivationProbe",
    "Alert",
    "Callback",
    "Cause",
    "GradientProbe",
    "History",
    "Level",
    "LossProbe",
    "Monitor",
    "OptimizerProbe",
    "ParamProbe",
    "ProbeState",
    "Record",
    "Rule",
    "Writer",
    "callbacks",
    "fingerprint",
    "fit",
    "rules",
    "step_stats",
    "tune",
    "watch",
    "writers",
]

__version__ = "0.1.0"

_HOMES = {
    "ActivationProbe": "nnx_probes.callbacks.activations",
    "Alert": "nnx_probes.host.alert",
    "Callback": "nnx_probes.callbacks.base",
    "Cause": "nnx_probes.host.alert",
    "GradientProbe": "nnx_probes.callbacks.grads",
    "History": "nnx_probes.host.history",
    "Level": "nnx_probes.host.alert",
    "LossProbe": "nnx_probes.callbacks.loss",
    "Monitor": "nnx_probes.monitor",
    "OptimizerProbe": "nnx_probes.callbacks.optimizer",
    "ParamProbe": "nnx_probes.callbacks.params",
    "ProbeState": "nnx_probes.device.tap",
    "Record": "nnx_probes.host.record",
    "Rule": "nnx_probes.host.rule",
    "Writer": "nnx_probes.writers.base",
    "fingerprint": "nnx_probes.device.fingerprint",
    "fit": "nnx_probes.loop",
    "step_stats": "nnx_probes.device.stats",
    "tune": "nnx_probes.tuning",
    "watch": "nnx_probes.device.tap",
}
"""Public name -> the module that defines it."""

_MODULES = {
    "callbacks": "nnx_probes.callbacks",
    "rules": "nnx_probes.host.rules",
    "writers": "nnx_probes.writers",
}
"""Public name -> the module it stands for."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        from nnx_probes.errors import closest

        raise AttributeError(f"module 'nnx_probes' has no attribute {name!r}.{closest(name, __all__)}")
    globals()[name] = value  # the next look-up finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
