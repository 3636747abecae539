"""The faults, by what goes wrong. A new one is one entry in one of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nnx_probes.faults.catalogue.entry import Fault
from nnx_probes.faults.catalogue.gradients import GRADIENTS
from nnx_probes.faults.catalogue.inputs import INPUTS
from nnx_probes.faults.catalogue.numbers import NUMBERS
from nnx_probes.faults.catalogue.state import STATE
from nnx_probes.faults.catalogue.updates import UPDATES

__all__ = ["FAULTS", "OUT_OF_REACH", "Fault"]

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {fault.slug: fault for fault in (*UPDATES, *GRADIENTS, *NUMBERS, *INPUTS, *STATE)}
)

OUT_OF_REACH: Mapping[str, str] = MappingProxyType(
    {
        "frozen_by_mistake": "a mask that freezes a layer too many: it looks as one that is meant, and is told as INFO",
        "labels_off_by_one": "labels are shifted by one inside their range: the task is another one, and is learnt",
        "labels_leaked": "an input contains the label: everything looks better than it is",
        "missing_nonlinearity": "two linear layers in a row: the model is weaker and learns well",
        "wrong_axis": "a loss that is plausible and wrong, such as a softmax over the batch",
        "broadcast_loss": "predictions (n, 1) against targets (n,): the mean is learnt, as from hard data",
        "one_wrong_product": "one device computes one matrix product wrongly: no trace without a second run",
    }
)
"""Faults that show in nothing a monitor can see without a reference."""
