"""What a person sees: TensorBoard, with each of its loaders, in a real browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from nnx_probes.writers import TensorBoardWriter

from . import browser
from .samples import alert, record

CHROMIUM = browser.find_chromium()

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")

CARDS = "[...document.querySelectorAll('card-view')].map(visible).join(' ').replace(/\\s+/g, ' ')"
"""Text of the charts that are shown."""


@pytest.fixture(scope="module", params=[("--load_fast=false",), ()], ids=["slow_loader", "default_loader"])
def shown(request, tmp_path_factory):
    """A tab, and the address of a TensorBoard that has read a run with an alert."""
    folder = tmp_path_factory.mktemp("run")
    writer = TensorBoardWriter(folder, leaf_scalars="bias")
    writer.write_header({"every": 100, "model": {"depth": "three | layers"}})
    for step in range(10):
        writer.write_record(record(step))
    writer.write_alert(alert(9, message="<script>document.title = 'hurt'</script> `x | y`"))
    writer.close()
    profile = tmp_path_factory.mktemp("profile")
    with browser.tensorboard(folder, *request.param) as address, browser.page(CHROMIUM, profile) as tab:
        tab.show(address)
        tab.until("(await (await fetch('data/plugin/text/tags')).text()).includes('alerts/all')")
        yield tab, address


def test_the_time_series_page_has_a_group_a_name_and_charts_with_values(shown):
    tab, address = shown
    tab.show(f"{address}#timeseries")
    text = tab.until(f"{CARDS}.includes('loss') && {CARDS}.includes('Step')")
    for group in ("alerts", "loss", "nonfinite", "optimizer", "params", "params_norm"):
        assert f" {group} " in text


def test_the_link_in_an_alert_shows_the_unsmoothed_chart_alone(shown):
    tab, address = shown
    tab.show(f"{address}?smoothing=0&tagFilter=loss#timeseries")
    # The last loss is 0.1; smoothed it would be 0.1284.
    tab.until(f"{CARDS}.includes('loss') && / 0\\.1 9 /.test({CARDS})")
    assert "params" not in tab.run(f"return {CARDS}")


@pytest.mark.parametrize("tag", ["params/norm", "params_norm/layers.0.bias"])
def test_an_aggregate_and_a_leaf_have_a_chart(shown, tag):
    tab, address = shown
    tab.show(f"{address}?smoothing=0&tagFilter={tag.replace('/', '%2F')}#timeseries")
    tab.until(f"{CARDS}.includes('{tag.split('/')[1]}') && {CARDS}.includes('Step')")


def test_the_text_page_shows_the_alert_and_the_table_and_runs_nothing_in_them(shown):
    tab, address = shown
    tab.show(f"{address}#text")
    for expected in (  # each text has a request of its own, so each is waited for
        "ERROR frozen_params at step 9 No parameter changes",
        "<script>document.title = 'hurt'</script> `x | y`",
        "The step is compiled with jax.jit ( jit_copies ) – optimizer.step stays at 0",
        "Show the chart of loss",
        "step level rule what most likely cause fix 9 ERROR frozen_params",
        "layers.0.kernel mix64:0000000000000000",
    ):
        tab.until(f"visible(document.body).replace(/\\s+/g, ' ').includes({json.dumps(expected)})")
    assert tab.run("return document.title") == "TensorBoard"
    answer = "await (await fetch('data/plugin/text/text?run=.&tag=run%2Fconfiguration')).text()"
    assert "three | layers" in tab.run(f"return JSON.parse({answer})[0].text.replaceAll('&#124;', '|')")


def test_the_folder_of_a_faulty_demo_shows_its_scalars_and_its_alert(tmp_path):
    folder = tmp_path / "demo"
    command = [
        sys.executable,
        "-m",
        "nnx_probes.cli",
        "demo",
        "--fault",
        "jax-jit",
        "--steps",
        "21",
        "--logdir",
        str(folder),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 1, done.stderr
    with browser.tensorboard(folder) as address, browser.page(CHROMIUM, tmp_path / "profile") as tab:
        tab.show(address)
        tab.until("(await (await fetch('data/plugin/text/tags')).text()).includes('alerts/all')")
        tab.show(f"{address}?smoothing=0&tagFilter=loss#timeseries")
        tab.until(f"{CARDS}.includes('loss') && {CARDS}.includes('Step')")
        tab.show(f"{address}#text")
        for expected in (
            "ERROR lost_update at step 10 Every update is thrown away",
            "Use @nnx.jit instead of @jax.jit",
        ):
            tab.until(f"visible(document.body).replace(/\\s+/g, ' ').includes({json.dumps(expected)})")
