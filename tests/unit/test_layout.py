"""The house's rooms: imports go one way (DESIGN, section 3), and the flow and the configuration import no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "forebay"
#: What each room may import, besides itself and `errors`, `config`.
LOWER = {
    "cli": {"api", "bench", "data", "environment", "observe"},
    "api": {"bench", "runtime", "engine", "stages", "models", "decode", "io", "cost", "observe", "data", "flow"},
    "bench": {"runtime", "engine", "stages", "models", "decode", "io", "cost", "observe", "data", "flow"},
    "runtime": {"engine", "stages", "models", "decode", "io", "cost", "observe", "data", "flow"},
    "engine": {"environment", "models", "decode", "io", "observe", "data", "flow"},
    "stages": {"models", "decode", "io", "cost", "observe", "data", "flow"},
    "models": {"io", "cost", "observe", "data", "flow"},
    "decode": {"models", "io", "observe", "data", "flow"},
    "io": {"models", "observe", "data", "flow"},
    "cost": {"models", "data", "flow"},
    "observe": {"data", "flow"},
    "data": {"flow", "observe"},
    "flow": set(),
    "config": set(),
    "environment": set(),
    "errors": set(),
}


def imported(file):
    """Dotted forebay modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "forebay":
            yield from ([f"{node.module}.{n.name}" for n in node.names] if node.module == "forebay" else [node.module])
        elif isinstance(node, ast.Import):
            yield from (n.name for n in node.names if n.name.startswith("forebay."))


def room_of(module):
    return module.split(".")[1]


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_go_one_way(file):
    room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    allowed = LOWER[room] | {room, "config", "errors", "__version__"}
    assert [m for m in imported(file) if room_of(m) not in allowed] == []


@pytest.mark.parametrize("file", sorted((SOURCE / "decode").glob("*.py")), ids=lambda f: f.name)
def test_the_serving_side_shares_no_code_with_the_trainers_forward(file):
    """G8."""
    apart = {"forebay.models.drafter", "forebay.models.attention", "forebay.models.loss"}
    assert apart.isdisjoint(imported(file))


def test_the_flow_and_the_configuration_import_no_torch():
    names = [f"forebay.flow.{f.stem}" for f in (SOURCE / "flow").glob("*.py") if f.stem != "__init__"]
    code = f"import sys, importlib; [importlib.import_module(n) for n in {['forebay.config', 'forebay.flow', *names]}]"
    done = subprocess.run([sys.executable, "-c", code + "; sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0


def test_a_command_sets_what_the_libraries_read_and_leaves_what_the_user_has_set():
    code = """
import os
os.environ.pop("GOMP_SPINCOUNT", None)
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
from forebay.cli import main
from forebay.environment import DEFAULTS
main(["status", "no/such/run"])
assert os.environ["GOMP_SPINCOUNT"] == DEFAULTS["GOMP_SPINCOUNT"]
assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
