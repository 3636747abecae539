from __future__ import annotations

import html
import re

from hypothesis import given
from hypothesis import strategies as st
from tensorboard import plugin_util

from nnx_probes.writers.markdown import MAX_ROWS, alert_markdown, alert_table, chart_link, code, escape

from .samples import alert

GOLDEN = """\
### ERROR `frozen_params` at step 30

**No parameter changes**

2 of 2 leaves are bit-equal over 2 updates.

Where:

- `layers.0.kernel`
- `layers.0.bias`

Likely causes, most likely first:

1. **The step is compiled with jax.jit** (`jit_copies`) – optimizer.step stays at 0
    - Fix: Use nnx.jit
    - Check: optimizer.step rises
2. **The learning rate is 0** (`zero_rate`)
    - Fix: Check the schedule

[Show the chart of loss](?smoothing=0&tagFilter=loss#timeseries)
"""


def test_an_alert_reads_as_agreed():
    assert alert_markdown(alert()) == GOLDEN


def test_the_chart_link_survives_tensorboards_sanitizer():
    shown = plugin_util.markdown_to_safe_html(alert_markdown(alert()))
    assert '<a href="?smoothing=0&amp;tagFilter=loss#timeseries">' in shown


def test_the_chart_link_matches_the_tag_literally():
    assert chart_link("params/norm[0]") == r"?smoothing=0&tagFilter=params%2Fnorm%5C%5B0%5C%5D#timeseries"


def _shown(markdown: str) -> str:
    text = re.sub(r"<[^>]*>", "", plugin_util.markdown_to_safe_html(markdown))
    return html.unescape(text)


@given(st.text(st.sampled_from("ab`|<>&*_[]()#+-=~\\!{}.1 :'\""), max_size=30))
def test_escaped_text_is_shown_literally_by_tensorboard(text):
    shown = _shown(escape(f"x{text}x", one_line=True))
    assert shown.split() == f"x{text}x".split()


@given(st.text(st.sampled_from("ab`|<>&*_[]()#+-=~\\!.1 "), min_size=1, max_size=20))
def test_a_message_that_begins_like_a_list_or_heading_stays_a_paragraph(text):
    shown = plugin_util.markdown_to_safe_html(escape(text))
    assert not re.search(r"<(li|h1|h2|ul|ol|hr|blockquote|pre|em|strong|a)\b", shown)


def test_a_path_cannot_break_out_of_its_cell_or_run_script():
    path = "a`|<script>alert(1)</script>"
    table = alert_table([alert(title=path)])
    rows = table.strip().split("\n")
    assert len({row.count("|") for row in rows}) == 1
    assert "<script" not in table and "<script" not in alert_markdown(alert(paths=(path,)))
    assert path in _shown(alert_markdown(alert(paths=(path,))))


def test_control_characters_are_shown_as_escapes():
    assert escape("a\x1b[31m\u202e") == "a&#92;u001b&#91;31m&#92;u202e"
    assert code("a\x00b").count("\x00") == 0


def test_at_most_eight_paths_are_named():
    text = alert_markdown(alert(paths=tuple(f"leaf{i}" for i in range(11))))
    assert "`leaf7`" in text and "`leaf8`" not in text and "- and 3 more" in text


def test_the_table_keeps_the_last_rows_and_says_how_many_it_leaves_out():
    table = alert_table([alert(step=i) for i in range(MAX_ROWS + 3)])
    assert table.startswith("3 earlier alerts are left out")
    assert "| 2 |" not in table and "| 3 |" in table and f"| {MAX_ROWS + 2} |" in table
    assert alert_table([alert()], total=10).startswith("9 earlier alerts")


def test_the_table_renders_as_one():
    shown = plugin_util.markdown_to_safe_html(alert_table([alert(), alert(step=31)]))
    assert shown.count("<tr>") == 3
