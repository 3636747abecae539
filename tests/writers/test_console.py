from __future__ import annotations

import io
import subprocess
import sys

import pytest

from nnx_probes.errors import ArgumentTypeError
from nnx_probes.host.alert import Level
from nnx_probes.writers import ConsoleWriter, RecordWriter, Writer

from .samples import alert, record

GOLDEN = """\
╭─ ERROR frozen_params at step 30 ─────────────────────────────────────────────────────────────────╮
│ No parameter changes                                                                             │
│ 2 of 2 leaves are bit-equal over 2 updates.                                                      │
│ where: layers.0.kernel, layers.0.bias                                                            │
│ likely cause: The step is compiled with jax.jit – optimizer.step stays at 0                      │
│ fix: Use nnx.jit                                                                                 │
│ check: optimizer.step rises                                                                      │
│ or: The learning rate is 0                                                                       │
╰──────────────────────────────────────────────────────────────────────────────────────────────────╯
"""


def test_an_alert_prints_as_agreed():
    file = io.StringIO()
    ConsoleWriter(file).write_alert(alert())
    assert file.getvalue() == GOLDEN


def test_it_goes_to_standard_error_as_it_is_at_that_moment(capsys):
    writer = ConsoleWriter()
    writer.write_alert(alert())
    captured = capsys.readouterr()
    assert captured.err == GOLDEN and captured.out == ""


def test_only_alerts_of_the_level_are_printed():
    file = io.StringIO()
    writer = ConsoleWriter(file, Level.WARN)
    writer.write_alert(alert(level=Level.INFO))
    assert file.getvalue() == ""
    writer.write_alert(alert(level=Level.WARN))
    assert "WARN frozen_params" in file.getvalue()


def test_user_text_is_neither_markup_nor_control_codes():
    file = io.StringIO()
    ConsoleWriter(file).write_alert(alert(title="[bold]x[/bold] [/]", message="a\x1b[31mb"))
    assert "[bold]x[/bold] [/]" in file.getvalue()
    assert "\x1b" not in file.getvalue() and "\\u001b[31m" in file.getvalue()


def test_lines_stay_within_100_columns():
    file = io.StringIO()
    ConsoleWriter(file).write_alert(alert(message="word " * 100, paths=("p" * 300,)))
    assert max(len(line) for line in file.getvalue().splitlines()) == 100


def test_an_ascii_terminal_gets_ascii():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    ConsoleWriter(file).write_alert(alert(paths=("größe",)))
    shown = raw.getvalue().decode("ascii")
    assert "+- ERROR frozen_params" in shown and "gr\\xf6\\xdfe" in shown


def test_an_ascii_process_prints_and_exits_cleanly():
    program = (
        "from nnx_probes.writers import ConsoleWriter\n"
        "from nnx_probes.host.alert import Alert, Level\n"
        "ConsoleWriter().write_alert(Alert(1, 'r', Level.ERROR, 'gr\\u00f6\\u00dfe'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", program],
        env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert b"ERROR r at step 1" in done.stderr and done.stderr.isascii()


def test_it_prints_above_a_running_progress_bar():
    from rich.console import Console
    from rich.progress import Progress

    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with Progress(console=console, auto_refresh=False) as progress:
        progress.add_task("train", total=10)
        ConsoleWriter().write_alert(alert())  # sys.stderr is the bar's proxy now
        progress.refresh()
    assert "ERROR frozen_params" in shown.getvalue()


def test_scalars_are_printed_only_on_request():
    file = io.StringIO()
    ConsoleWriter(file).write_scalars(3, {"loss": 1.0})
    ConsoleWriter(file).write_record(record(3))
    assert file.getvalue() == ""
    ConsoleWriter(file, scalars=True).write_scalars(step=3, scalars={"loss": 0.123456789, "acc": 1})
    assert file.getvalue() == "[3] loss=0.123457, acc=1\n"


def test_all_other_calls_print_nothing_and_the_file_stays_open():
    file = io.StringIO()
    writer = ConsoleWriter(file)
    assert isinstance(writer, Writer) and isinstance(writer, RecordWriter)
    writer.write_texts(step=1, texts={"a": "b"})
    writer.write_histograms(step=1, arrays={}, num_buckets=None)
    writer.write_summaries(step=1, values={}, metadata=None)
    writer.write_images(step=1, images={})
    writer.write_videos(step=1, videos={})
    writer.write_audios(step=1, audios={}, sample_rate=1)
    writer.write_hparams(hparams={})
    writer.write_header({})
    writer.write_mark(1, "a")
    writer.close()
    assert file.getvalue() == "" and not file.closed


def test_wrong_arguments_are_errors_in_words():
    with pytest.raises(ArgumentTypeError, match="got str 'stderr', expected an open text file"):
        ConsoleWriter("stderr")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="got str 'warn', expected a Level"):
        ConsoleWriter(level="warn")  # type: ignore[arg-type]
