"""What is known of a batch that can no longer be read."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import nnx_probes as probes
from nnx_probes.callbacks import BatchProbe
from nnx_probes.writers import MemoryWriter


@pytest.mark.parametrize(("kept", "largest"), [((), None), (((1, 7, 3),), 7.0)])
def test_the_largest_integer_is_that_of_the_arrays_that_can_be_read(kept, largest):
    gone = jnp.arange(5)
    gone.delete()
    batch = (gone, *(np.array(values) for values in kept), np.ones((2, 2), np.float32))
    writer = MemoryWriter()
    with probes.Monitor(writer, every=1, callbacks=(BatchProbe(),)) as monitor:
        monitor(0, loss=float("nan"), batch=batch)
    assert monitor.failures == {}
    (record,) = [r for r in writer.records if "batch.norm" in r]
    assert record.get("batch.max_int") == largest
