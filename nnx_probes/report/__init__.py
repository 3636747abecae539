"""A stored run, judged again: the same rules over the same records give the same alerts. Needs no jax.

    from nnx_probes.report import replay

    for run in replay("runs/a").runs:
        print(run.alerts, run.differences)

What the live run knew beside its records is in the file too: the settings of its rules and its `Facts` in the header,
announced events as marks, and what a trial of the optimizer found in the record it was made for.
"""

from __future__ import annotations

from nnx_probes.report.differences import Difference
from nnx_probes.report.printed import print_report
from nnx_probes.report.replay import Replay, RunReplay, replay

__all__ = ["Difference", "Replay", "RunReplay", "print_report", "replay"]
