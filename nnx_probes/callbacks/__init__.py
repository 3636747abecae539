"""The built-in callbacks. A new probe is one file here; if it should run by default, one line in `default`."""

from __future__ import annotations

from nnx_probes.callbacks.activations import ActivationProbe
from nnx_probes.callbacks.base import Callback, Context, Later
from nnx_probes.callbacks.batch import BatchProbe
from nnx_probes.callbacks.grads import GradientProbe
from nnx_probes.callbacks.labels import LabelProbe
from nnx_probes.callbacks.loss import LossProbe
from nnx_probes.callbacks.mode import ModeProbe
from nnx_probes.callbacks.optimizer import OptimizerProbe
from nnx_probes.callbacks.params import ParamProbe

__all__ = [
    "ActivationProbe",
    "BatchProbe",
    "Callback",
    "Context",
    "GradientProbe",
    "LabelProbe",
    "Later",
    "LossProbe",
    "ModeProbe",
    "OptimizerProbe",
    "ParamProbe",
    "default",
]


def default() -> tuple[Callback, ...]:
    """Returns the default set, freshly made."""
    return (ParamProbe(), OptimizerProbe(), GradientProbe(), LossProbe(), BatchProbe(), ModeProbe(), LabelProbe())
