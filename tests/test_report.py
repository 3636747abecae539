"""The report of a stored run: what it prints, its exit codes, and that no damage of the file stops it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_imports import imports_of
from writers.samples import alert, record

import nnx_probes
from nnx_probes.cli import main
from nnx_probes.errors import ArgumentError, ArgumentTypeError, WriterError
from nnx_probes.host import rules
from nnx_probes.host.alert import Level
from nnx_probes.host.history import Facts
from nnx_probes.host.judge import Judge
from nnx_probes.report import Difference, replay
from nnx_probes.report.rebuilt import facts_of, rule_of, rules_of
from nnx_probes.writers import ConsoleWriter, JsonlWriter
from nnx_probes.writers import jsonl_read as reader

pytestmark = pytest.mark.smoke

NAN = float("nan")
HEADER = {
    "versions": {"nnx-probes": nnx_probes.__version__, "jax": "0.10"},
    "rules": [repr(rule) for rule in rules.default()],
    "facts": asdict(Facts()),
}


def write(folder, losses, *, header=HEADER, alerts=True, more=()):
    """Writes a run as a monitor does; returns its name and its file."""
    writer, judge = JsonlWriter(folder), Judge(rules.default())
    if header is not None:
        writer.write_header(header)
    for step, loss in enumerate(losses):
        one = record(step, loss=loss)
        judge.observe(one)
        writer.write_record(one)
        for found in judge.verdicts(one) if alerts else ():
            writer.write_alert(found)
    for found in more:
        writer.write_alert(found)
    writer.close()
    return writer.run, writer.path


def said(folder):
    """Returns each alert of a file with one run as ``"rule@step"``."""
    (run,) = replay(folder).runs
    return [f"{one.rule}@{one.step}" for one in run.alerts]


# --- what it prints -----------------------------------------------------------------------------------------


def test_the_text_is_a_head_the_alerts_as_on_the_console_and_a_count(tmp_path, capsys):
    run, _ = write(tmp_path, [1.0, 0.5, NAN])
    assert main(["report", str(tmp_path)]) == 1
    panel = io.StringIO()
    ConsoleWriter(panel).write_alert(*replay(tmp_path).runs[0].alerts)
    version = nnx_probes.__version__
    assert capsys.readouterr().out == (
        f"run {run}: nnx-probes {version}, jax 0.10; steps 0 to 2, 3 probes, 20 rules\n"
        f"{panel.getvalue()}"
        "1 alert (1 error, 0 warnings, 0 infos), 0 lines skipped\n"
    )
    assert "─ ERROR nonfinite at step 2 ─" in panel.getvalue()


def test_a_sound_run_ends_with_code_0(tmp_path, capsys):
    write(tmp_path, [1.0, 0.5])
    assert main(["report", str(tmp_path / "probes.jsonl")]) == 0
    assert capsys.readouterr().out.endswith("0 alerts (0 errors, 0 warnings, 0 infos), 0 lines skipped\n")


def test_json_is_one_strict_object_with_all_fields(tmp_path, capsys):
    run, path = write(tmp_path, [1.0, NAN], more=[alert()])
    with path.open("ab") as file:
        file.write(b"garbage\n")
    assert main(["report", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert list(found) == ["file", "runs", "alerts", "differences", "skipped"]
    assert [(one["run"], one["first_step"], one["last_step"], one["probes"]) for one in found["runs"]] == [
        (run, 0, 1, 2)
    ]
    stored = [json.loads(line) for line in path.read_bytes().splitlines()[:-1]]
    assert found["alerts"] == [
        {name: value for name, value in row.items() if name != "kind"}
        for row in stored
        if row["kind"] == "alert" and row["rule"] == "nonfinite"
    ]
    assert [(one["kind"], one["alert"]["rule"]) for one in found["differences"]] == [("missing", "frozen_params")]
    assert [one["line"] for one in found["skipped"]] == [len(stored) + 1]


def test_each_run_of_a_file_is_reported_and_one_can_be_chosen(tmp_path, capsys):
    (one, _), (other, _) = write(tmp_path, [1.0, NAN]), write(tmp_path, [1.0])
    assert main(["report", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown.index(f"run {one}: ") < shown.index(f"run {other}: ")
    assert shown.endswith("\n2 runs: 1 alert (1 error, 0 warnings, 0 infos), 0 lines skipped\n")
    assert main(["report", str(tmp_path), "--run", other]) == 0
    assert one not in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--run", "none"]) == 2
    assert f"has no run 'none': expected one of {one}, {other}." in capsys.readouterr().err


def test_what_is_stored_and_what_the_rules_say_now_is_compared(tmp_path, capsys):
    _, path = write(tmp_path, [1.0, NAN], more=[alert(1, "spike")])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line.replace("The loss held 1", "The loss held a") for line in lines))
    assert main(["report", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "difference: ERROR nonfinite at step 1 has another message than in the file\n" in shown
    assert "difference: ERROR spike at step 1 is in the file and is not raised here\n" in shown
    path.write_text("".join(line for line in lines if '"kind":"alert"' not in line))
    main(["report", str(tmp_path)])
    assert "difference: ERROR nonfinite at step 1 is raised here and is not in the file\n" in capsys.readouterr().out


def test_the_last_bits_of_a_number_are_no_difference(tmp_path):
    def store(name, change):
        found = replace(nonfinite, values={"loss.nonfinite": nonfinite.values["loss.nonfinite"] * change})
        write(tmp_path / name, [1.0, NAN], alerts=False, more=[found])
        return replay(tmp_path / name).runs[0].differences

    write(tmp_path, [1.0, NAN])
    (nonfinite,) = replay(tmp_path).runs[0].alerts
    assert store("a", 1 + 1e-12) == ()
    assert store("b", 1.1) == (Difference("changed", nonfinite, ("values",)),)


def test_alerts_of_a_user_s_rule_are_shown_as_stored_and_that_is_said(tmp_path, capsys):
    header = {**HEADER, "rules": ["__main__.Mine(limit=3)", *HEADER["rules"]]}
    write(tmp_path, [1.0], header=header, more=[alert(0, "mine", level=Level.INFO)])
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "INFO mine at step 0" in shown and "difference" not in shown
    assert "left out: __main__.Mine(limit=3): not a built-in rule; its alerts are as stored\n" in shown


def test_a_file_without_facts_or_header_is_judged_and_what_is_assumed_is_said(tmp_path, capsys):
    old = {"versions": {"nnx-probes": "0.0.1"}, "rules": HEADER["rules"], "settings": {"total_steps": 7}}
    write(tmp_path / "old", [NAN], header=old)
    write(tmp_path / "none", [NAN], header=None)
    assert said(tmp_path / "old") == said(tmp_path / "none") == ["nonfinite@0"]
    main(["report", str(tmp_path / "old")])
    shown = capsys.readouterr().out
    assert "note: The file does not say what was known" in shown and "and 7 steps" in shown
    assert f"note: The file was written by nnx-probes 0.0.1, and this is {nnx_probes.__version__}.\n" in shown
    main(["report", str(tmp_path / "none")])
    assert "note: The run's header is not in the file.\n" in capsys.readouterr().out


def test_control_characters_do_not_reach_the_terminal(tmp_path, capsys):
    header = {**HEADER, "versions": {"nnx-probes": "\x1b[31m"}, "rules": ["\x1b[2J()"]}
    write(tmp_path, [1.0], header=header, more=[alert(title="\x1b]0;x\x07")])
    main(["report", str(tmp_path)])
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out and "\x07" not in captured.out and "\\u001b" in captured.out


def test_a_reader_that_stops_early_gets_no_traceback(tmp_path):
    write(tmp_path, [1.0, NAN])
    program = f"{sys.executable} -m nnx_probes.cli report {tmp_path}"
    done = subprocess.run(
        f"{program} | true; echo ${{PIPESTATUS[0]}}", shell=True, executable="/bin/bash", capture_output=True
    )
    assert done.stderr == b"" and done.stdout in (b"141\n", b"1\n")


def test_it_needs_no_jax(tmp_path):
    write(tmp_path, [1.0, 0.5])
    code = f"from nnx_probes.cli import main; assert main(['report', {str(tmp_path)!r}]) == 0"
    assert not imports_of(code) & {"flax", "jax", "jaxlib", "optax", "tensorboard"}


# --- files that are damaged, or no files of a run -----------------------------------------------------------


def test_no_file_is_wrong_usage(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for name, text in {"empty": "no file", "missing": "no file", "\0": "is not a name"}.items():
        assert main(["report", str(tmp_path / name)]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(WriterError):
        replay(tmp_path / "missing")
    with pytest.raises(ArgumentTypeError):
        replay(3)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"once upon a time\nthere was a run\n",
        bytes(range(256)) * 100,
        b'{"kind":"scalars","run":"x","step":1,"values":{}}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_file_of_no_monitor_is_wrong_usage(content, tmp_path, capsys):
    (tmp_path / "probes.jsonl").write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    assert "is no file of a run" in capsys.readouterr().err
    with pytest.raises(ArgumentError):
        replay(tmp_path)


def test_a_folder_of_folders_names_those_that_hold_runs(tmp_path, capsys):
    for name in "abcde":
        write(tmp_path / name, [1.0])
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"Name one: {tmp_path / 'a'}, {tmp_path / 'b'}, {tmp_path / 'c'} and 2 more." in error


def test_a_run_that_was_killed_before_its_first_probe_is_reported(tmp_path, capsys):
    write(tmp_path, [])
    assert main(["report", str(tmp_path)]) == 0
    assert "; no step, 0 probes, 20 rules\n" in capsys.readouterr().out


def test_a_cut_last_line_is_skipped(tmp_path, capsys):
    _, path = write(tmp_path, [1.0, NAN, 0.5])
    lines = path.read_bytes().splitlines(keepends=True)[:-1]
    path.write_bytes(b"".join(lines)[:-30])
    assert main(["report", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f"skipped line {len(lines)}: cut off: the file ends inside the line\n" in shown
    assert shown.endswith("1 alert (1 error, 0 warnings, 0 infos), 1 line skipped\n")


def test_the_first_ten_skipped_lines_are_listed(tmp_path, capsys):
    _, path = write(tmp_path, [1.0])
    path.write_bytes(b'garbage\n{"kind":"poem","run":"x"}\n' * 6 + path.read_bytes() + b"\xff\xfe\n")
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("skipped line ") == 10 and "skipped 3 more\n" in shown
    assert shown.endswith(", 13 lines skipped\n")


def test_a_line_that_is_too_long_is_skipped_and_the_next_one_read(tmp_path, monkeypatch):
    _, path = write(tmp_path, [1.0, NAN])
    lines = path.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(reader, "_LONGEST", max(map(len, lines)))
    path.write_bytes(b"".join([*lines[:2], b"x" * 100_000 + b"\n", *lines[2:], b"y" * 100_000]))
    found = replay(tmp_path)
    assert [number for number, _ in found.skipped] == [3, len(lines) + 2]
    assert all("longer than" in reason for _, reason in found.skipped)
    assert said(tmp_path) == ["nonfinite@1"]


def test_a_long_line_that_holds_a_probe_is_read(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write_record(record(0, loss=NAN, text="x" * 10_000_000))
    writer.close()
    assert said(tmp_path) == ["nonfinite@0"]


def test_without_its_table_a_probe_is_judged_by_what_is_left(tmp_path):
    _, path = write(tmp_path, [1.0, NAN])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"kind":"leaves"' not in line))
    found = replay(tmp_path)
    assert [reason for _, reason in found.skipped] == ["the leaves of params are not in the file"] * 2
    assert said(tmp_path) == ["nonfinite@1"]
    assert [(one.kind, one.alert.rule) for one in found.runs[0].differences] == [("changed", "nonfinite")]


def test_a_probe_with_impossible_content_is_skipped_and_the_next_one_judged(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write_header(HEADER)
    writer.write_record(record(0, loop__steps="many"))
    writer.write_record(record(1, params__fingerprint=("one",)))
    writer.write_record(record(2, loss=NAN))
    writer.close()
    found = replay(tmp_path)
    assert [number for number, _ in found.skipped] == [3, 4]
    assert all(reason.startswith("cannot be judged: ValueError") for _, reason in found.skipped)
    assert said(tmp_path) == ["nonfinite@2"]


@pytest.mark.parametrize("step", [b'"3"', b"null", b"1.5", b"true"])
def test_a_step_that_is_no_whole_number_makes_its_line_unreadable(step, tmp_path):
    _, path = write(tmp_path, [1.0, NAN])
    path.write_bytes(path.read_bytes().replace(b'"step":0,', b'"step":' + step + b",", 1))
    assert "the step is no whole number" in replay(tmp_path).skipped[0][1]
    assert said(tmp_path) == ["nonfinite@1"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_no_damage_of_the_bytes_stops_it(tmp_path, data):
    whole = tmp_path / "whole.jsonl"
    if not whole.exists():
        write(whole, [1.0, NAN, 0.5], more=[alert()])
    raw = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    hurt = tmp_path / "hurt.jsonl"
    hurt.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    assert main(["report", str(hurt)]) in (0, 1, 2)
    assert main(["report", str(hurt), "--json"]) in (0, 1, 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_file_that_may_not_be_read_is_wrong_usage(tmp_path, capsys):
    _, path = write(tmp_path, [1.0])
    path.chmod(0)
    assert main(["report", str(tmp_path)]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_nothing_is_written(tmp_path):
    _, path = write(tmp_path, [1.0])
    before = path.read_bytes(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())
    path.chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        assert main(["report", str(tmp_path)]) == 0
    finally:
        tmp_path.chmod(0o700)
    assert (path.read_bytes(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())) == before


# --- rules and facts out of a header ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        *rules.default(),
        rules.Spike(z=float("inf"), ratio=-float("inf"), jump=1e-300),
        rules.Nonfinite(allow=("loss", "grads")),
        rules.FrozenParams(leaf=10**20),
    ],
)
def test_a_rule_is_made_again_from_its_repr(rule):
    assert rule_of(repr(rule)) == rule


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a built-in rule"),
        ("Spike", "not a built-in rule"),
        ("mine.Spike(z=6.0)", "not a built-in rule"),
        ("<__main__.Mine object at 0x7f>", "not a built-in rule"),
        ("f.<locals>.Mine()", "not a built-in rule"),
        ("default()", "not a built-in rule"),
        ("Spike(z=6.0); Spike()", "not a built-in rule"),
        ("a\0b", "not a built-in rule"),
        ("Spike(6.0)", "its settings cannot be read (ValueError: arguments without a name)"),
        ("Spike(width=6.0)", "its settings cannot be read (TypeError: "),
        ("Spike(z=np.float64(6.0))", "its settings cannot be read (ValueError: "),
        ("Spike(z=__import__('os').getcwd())", "its settings cannot be read (ValueError: "),
        ("Spike(**{'z': 1})", "its settings cannot be read (TypeError: "),
        ("Nonfinite(allow=('everything',))", "its settings cannot be read (ArgumentError: "),
        ("Spike(z=" + "(" * 5000 + ")" * 5000 + ")", "not a built-in rule"),
    ],
)
def test_what_is_no_built_in_rule_is_told(text, reason):
    found = rule_of(text)
    assert isinstance(found, str) and found.startswith(reason)


def test_facts_of_another_version_are_taken_as_far_as_they_are_known():
    assert facts_of({"facts": {"total_steps": 9, "watched": True, "weather": "fine"}}) == (Facts(9, True), ())
    assert rules_of({"rules": 3}).rules == rules.default()


def test_a_stored_alert_may_hold_arrays_and_nan(tmp_path):
    odd = replace(alert(0, "mine"), values={"array": np.zeros(3), "nan": NAN})
    write(tmp_path, [1.0], header={**HEADER, "rules": ["mine.Mine()"]}, more=[odd, odd])
    assert said(tmp_path) == ["mine@0"] * 2
