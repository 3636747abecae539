"""What importing costs, which way imports point, and what the root offers."""

from __future__ import annotations

import ast
import json
import pkgutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nnx_probes

pytestmark = pytest.mark.smoke

PACKAGE = Path(nnx_probes.__file__).parent
MODULES = {
    ".".join(("nnx_probes", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

PUBLIC = {
    *("ActivationProbe", "Alert", "Callback", "Cause", "GradientProbe", "History", "Level", "LossProbe", "Monitor"),
    *("OptimizerProbe", "ParamProbe", "ProbeState", "Record", "Rule", "Writer"),
    *("callbacks", "fingerprint", "fit", "rules", "step_stats", "tune", "watch", "writers"),
}

# ---------------------------------------------------------------------------------------------------
# What a fresh interpreter imports
# ---------------------------------------------------------------------------------------------------

# Notes each import that is tried, so that `try: import torch` is seen where torch is not installed.
LISTENER = """
import sys
class Listener:
    def find_spec(self, name, path=None, target=None):
        tried.add(name.partition(".")[0])
tried = set()
sys.meta_path.insert(0, Listener())
try:
    exec(sys.argv[1])
except SystemExit as exit:
    assert not exit.code, exit.code
import json
print(json.dumps(sorted(tried)))
"""

HEAVY = {"flax", "jax", "jaxlib", "numpy", "optax", "rich", "tensorboard", "tensorboardX"}
FOREIGN = {"tensorflow", "torch"}


def imports_of(code: str) -> set[str]:
    """Returns the top-level packages that running `code` in a fresh interpreter tries to import."""
    done = subprocess.run(
        [sys.executable, "-c", LISTENER, code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def import_all(*prefixes: str) -> str:
    """Returns code that imports every module whose name starts with one of `prefixes`."""
    return "\n".join(f"import {name}" for name in MODULES if name.startswith(prefixes))


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not imports_of("import nnx_probes") & (HEAVY | FOREIGN)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["demo", "--help"], ["report", "--help"], ["faults", "--help"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert not imports_of(f"from nnx_probes.cli import main; main({arguments})") & (HEAVY | FOREIGN)


def test_the_host_and_writer_floors_and_the_report_work_without_jax() -> None:
    code = import_all(
        "nnx_probes.host", "nnx_probes.writers", "nnx_probes.errors", "nnx_probes.report", "nnx_probes.cli"
    )
    assert not imports_of(code) & {"flax", "jax", "jaxlib", "optax"}


def test_no_module_imports_tensorflow_or_torch() -> None:
    imported = imports_of(import_all("nnx_probes"))
    assert "jax" in imported  # so the modules really were imported
    assert not imported & FOREIGN


def test_a_whole_run_with_all_its_writers_imports_neither_tensorflow_nor_torch(tmp_path: Path) -> None:
    arguments = ["demo", "--steps", "3", "--every", "1", "--logdir", str(tmp_path)]
    imported = imports_of(f"from nnx_probes.cli import main; assert main({arguments}) in (0, 1)")
    assert "jax" in imported
    assert not imported & FOREIGN


@pytest.mark.parametrize(
    "code",
    ["import jax", "def f():\n  import jax.numpy\nf()", "try:\n  import jax\nexcept ImportError: pass"],
)
def test_a_planted_import_is_noticed(code: str) -> None:
    assert "jax" in imports_of(f"import nnx_probes\n{code}")


def test_a_planted_import_of_what_is_not_installed_is_noticed() -> None:
    code = "try:\n  import not_installed.part\nexcept ImportError: pass"
    assert "not_installed" in imports_of(code)


# ---------------------------------------------------------------------------------------------------
# Floors: imports point down only
# ---------------------------------------------------------------------------------------------------

FLOORS = {
    "errors": 0,
    **{"device": 1, "host": 2, "writers": 3},
    # callbacks, monitor and every other module beside it: 4
    **dict.fromkeys(["integrations", "cli", "demo", "diff", "faults", "report", "tuning"], 5),
    "": 5,  # the root, which leads everywhere
}
MIDDLE_FLOOR = 4

BARRED = {"host": {"device"}, "writers": {"device"}}
"""Lower floors that a floor may not use all the same: these two read stored runs, without jax."""

NO_JAX = {"host", "writers", "report"}
JAX_PACKAGES = {"flax", "jax", "jaxlib", "optax", "orbax"}


def part_of(module: str) -> str:
    """Returns the floor's name of a dotted module name: ``"host"`` for ``"nnx_probes.host.rules"``."""
    return module.split(".")[1] if "." in module else ""


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yields line and dotted name of what is imported at run time, in functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield from imported_modules(ast.Module([branch], []), module, is_package)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            if base == "nnx_probes":  # a name of the root: where does it live?
                names = (alias.name for alias in node.names if alias.name != "__version__")
                homes = {**nnx_probes._HOMES, **nnx_probes._MODULES}
                yield from ((node.lineno, homes.get(name, f"nnx_probes.{name}")) for name in names)
            else:
                yield node.lineno, base
        else:
            yield from imported_modules(node, module, is_package)


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Returns one line for each import in `source` that points up or to a barred floor."""
    here = part_of(module)
    floor = FLOORS.get(here, MIDDLE_FLOOR)
    found = []
    for line, name in imported_modules(ast.parse(source), module, is_package):
        if name.partition(".")[0] == "nnx_probes":
            there = part_of(name)
            wrong = FLOORS.get(there, MIDDLE_FLOOR) > floor or there in BARRED.get(here, ())
        else:
            wrong = here in NO_JAX and name.partition(".")[0] in JAX_PACKAGES
        if wrong:
            found.append(f"{module}:{line} imports {name}")
    return found


def test_imports_point_down_only() -> None:
    found = [
        line
        for module, path in MODULES.items()
        for line in violations(path.read_text(), module, is_package=path.name == "__init__.py")
    ]
    assert not found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nnx_probes.device.leaves", "from nnx_probes.host.record import Record"),
        ("nnx_probes.device.leaves", "import nnx_probes.writers.base"),
        ("nnx_probes.host.record", "from nnx_probes.device.leaves import walk"),
        ("nnx_probes.host.record", "from ..device import leaves"),
        ("nnx_probes.host.record", "def f():\n    from nnx_probes.device import leaves"),
        ("nnx_probes.host.record", "from nnx_probes import fingerprint"),
        ("nnx_probes.host.record", "import jax.numpy as jnp"),
        ("nnx_probes.writers.jsonl", "from nnx_probes.device.leaves import walk"),
        ("nnx_probes.writers.jsonl", "if x:\n    import jax"),
        ("nnx_probes.callbacks.loss", "import nnx_probes as probes"),
        ("nnx_probes.monitor", "from nnx_probes.cli import main"),
        ("nnx_probes.report.replay", "import jax"),
        ("nnx_probes.errors", "from nnx_probes.host.alert import Alert"),
        ("nnx_probes.host.record", "if TYPE_CHECKING:\n    pass\nelse:\n    import jax"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nnx_probes.host.record", "from nnx_probes.errors import closest"),
        ("nnx_probes.host.record", "from . import alert"),
        ("nnx_probes.host.record", "if TYPE_CHECKING:\n    import jax"),
        ("nnx_probes.device.leaves", "import jax"),
        ("nnx_probes.writers.jsonl", "from nnx_probes import Alert, __version__"),
        ("nnx_probes.monitor", "from nnx_probes.device.leaves import walk"),
        ("nnx_probes.demo.run", "import nnx_probes as probes"),
    ],
)
def test_an_import_that_points_down_is_let_through(module: str, source: str) -> None:
    assert not violations(source, module)


# ---------------------------------------------------------------------------------------------------
# Size and names of modules
# ---------------------------------------------------------------------------------------------------


def test_modules_are_short() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {module: length for module, length in lengths.items() if length > 350} == {}
    assert statistics.median(lengths.values()) <= 180


def test_modules_are_named_after_what_they_hold() -> None:
    assert not {name.rpartition(".")[2].strip("_") for name in MODULES} & {
        *("common", "helper", "helpers", "misc", "util", "utils")
    }


def test_every_folder_with_modules_is_a_package() -> None:
    found = {module.name for module in pkgutil.walk_packages(nnx_probes.__path__, "nnx_probes.")}
    assert found == set(MODULES) - {"nnx_probes"}


# ---------------------------------------------------------------------------------------------------
# The root
# ---------------------------------------------------------------------------------------------------


def test_all_is_the_documented_set_and_sorted() -> None:
    assert set(nnx_probes.__all__) == PUBLIC
    assert nnx_probes.__all__ == sorted(nnx_probes.__all__)
    assert set(nnx_probes.__dir__()) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_what_its_home_defines(name: str) -> None:
    value = getattr(nnx_probes, name)
    if name in nnx_probes._MODULES:
        assert value is sys.modules[nnx_probes._MODULES[name]]
    else:
        assert value is getattr(sys.modules[nnx_probes._HOMES[name]], name)


def test_type_checkers_see_the_same_homes() -> None:
    tree = ast.parse(Path(nnx_probes.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    parents = {name: home.rpartition(".")[0] for name, home in nnx_probes._MODULES.items()}
    assert seen == {**nnx_probes._HOMES, **parents}


@pytest.mark.parametrize(("wrong", "right"), [("Moniter", "Monitor"), ("watchh", "watch")])
def test_an_unknown_name_gets_the_closest_valid_one(wrong: str, right: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{wrong}'. Did you mean '{right}'"):
        getattr(nnx_probes, wrong)


def test_a_name_like_no_other_is_an_attribute_error() -> None:
    assert not hasattr(nnx_probes, "qqqqqqqq")
