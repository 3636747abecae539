"""Draws the picture in README: the alert of ``nnx-probes demo --fault jax-jit``, as benchmarks/alert.svg.

usage: python benchmarks/picture.py
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

from rich.console import Console

from nnx_probes.demo.faults import FAULTS
from nnx_probes.demo.recipe import Recipe
from nnx_probes.demo.run import train
from nnx_probes.demo.text import load
from nnx_probes.writers.console import MAX_WIDTH, alert_panel


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        recipe = FAULTS["jax-jit"].apply(Recipe(), 20)
        quiet = Console(file=io.StringIO())
        outcome = train(recipe, load(), steps=20, every=10, logdir=Path(folder) / "run", console=quiet)
    console = Console(record=True, width=MAX_WIDTH, file=io.StringIO())
    console.print(alert_panel(outcome.alerts[0]))
    svg = console.export_svg(title="nnx-probes demo --fault jax-jit", unique_id="alert")
    svg = re.sub(r"\n\s*@font-face \{.*?\}", "", svg, flags=re.S)  # no fonts from elsewhere
    target = Path(__file__).with_name("alert.svg")
    target.write_text(svg)
    print(f"{target}: {len(svg)} bytes")


if __name__ == "__main__":
    main()
