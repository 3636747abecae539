"""What the diagnosis says, as two files to read and to compare with.

usage: python tests/host/golden.py      (after a change that is meant; read the difference before it is committed)

golden/given_facts.json: rule and facts -> causes with their scores, for what each explanation needs, each thing that speaks
for or against it, and each of its needs turned round. golden/runs.json: the alerts of the runs in runs.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from builders import run
from runs import all_runs

from nnx_probes.host.causes import EXPLANATIONS

FOLDER = Path(__file__).parent / "golden"


def given_facts():
    """Returns "rule: facts" -> ["slug score", ...], best first."""
    found = {}
    for entry in EXPLANATIONS:
        needs = tuple(sorted(entry.needs))
        cases = [needs, *((*needs, name) for name in (*entry.plus, *entry.minus))]
        cases += [(*(n for n in needs if n != one), turned(one)) for one in needs]
        for facts in cases:
            for rule in entry.rules:
                said = f"{rule}: {', '.join(sorted(f for f in facts if f[0] != '!')) or 'nothing known'}"
                found[said] = ranked(rule, {name: True for name in facts if name[0] != "!"})
    return dict(sorted(found.items()))


def turned(name):
    return name[1:] if name[0] == "!" else f"!{name}"


def ranked(rule, facts):
    facts = {"absorbed_share": 0.5, **facts}
    causes = [cause for entry in EXPLANATIONS if (cause := entry.cause(rule, facts)) is not None]
    return [f"{cause.slug} {cause.score:g}" for cause in sorted(causes, key=lambda cause: -cause.score)]


def runs():
    """Returns for each run its alerts: ["step rule LEVEL leaves", ["slug score", ...]]."""
    return [
        [
            [f"{a.step} {a.rule} {a.level.name} {len(a.paths)}", [f"{c.slug} {c.score:g}" for c in a.causes]]
            for a in run(records, facts)[0]
        ]
        for records, facts in all_runs()
    ]


def stored(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in (("given_facts", given_facts()), ("runs", runs())):
        (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
