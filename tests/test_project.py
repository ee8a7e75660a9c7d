"""The project's own rules: rooms import only rooms above them, lists of packages agree, nothing leaks."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib

import pytest

from tests.support import ROOT

ROOMS = ["memory", "reuse", "execution", "serving", "study", "__main__"]
GROUND = {"contract", "reasons", "views", "__init__"}
MODULES = sorted(ROOT.glob("kvlab/**/*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ({node.module} | {f"{node.module}.{a.name}" for a in node.names})
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names)


def room(module):
    return module.split(".")[1] if "." in module else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_rooms_above_it(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    here = parts[1]
    for module in imports(path):
        if module.split(".")[0] == "app":
            pytest.fail("nothing imports app")
        if module.split(".")[0] != "kvlab" or module == "kvlab":
            continue
        there = room(module)
        if here in GROUND:
            assert there == here or {here, there} == {"contract", "reasons"}, f"{path.name} imports {module}"
        elif there not in GROUND:
            assert ROOMS.index(there) <= ROOMS.index(here), f"{path.name} imports {module}"


def test_kernels_know_tensors_only():
    for path in ROOT.glob("kernels/*.py"):
        assert not [m for m in imports(path) if m.split(".")[0] in ("kvlab", "app")]


@pytest.mark.parametrize("folder", ["kvlab", "kernels", "app", "notebooks"])
def test_modules_and_functions_stay_short(folder):
    for path in ROOT.glob(f"{folder}/**/*.py"):
        text = path.read_text()
        if not re.match(r"\d\d_", path.name):
            assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno <= 45, f"{path}: {node.name}"


def test_what_pages_cache_has_a_name_of_its_own():
    """Pages run as one module: two cached functions with one name and one text would answer for each other."""
    names = [node.name for path in ROOT.glob("app/**/*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.FunctionDef) and any("cache_" in ast.unparse(d) for d in node.decorator_list)]
    assert len(names) > 8 and len(set(names)) == len(names), sorted(names)


def tracked():
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / line for line in out.stdout.splitlines()]


def test_top_level_folders():
    allowed = {"notebooks", "kvlab", "kernels", "app", "fixtures", "tests"}
    folders = {p.relative_to(ROOT).parts[0] for p in tracked() if len(p.relative_to(ROOT).parts) > 1}
    assert {f for f in folders if not f.startswith(".")} == allowed


def test_conda_environment_agrees_with_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line.strip(" -") for line in (ROOT / "environment.yml").read_text().splitlines()]
    python = next(line for line in lines if line.startswith("python="))
    low, high = re.findall(r"3\.(\d+)", project["requires-python"])
    assert int(low) <= int(python.split(".")[1]) < int(high)
    assert "c constraints.txt" in lines and "e .[dev]" in lines
    assert "dev" in project["optional-dependencies"]


def test_the_app_starts_without_a_question_at_the_terminal():
    config = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())
    assert config["server"]["showEmailPrompt"] is False


def test_every_dependency_is_pinned_and_no_pin_is_local():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [d for ds in project["optional-dependencies"].values() for d in ds]
    names = {re.match(r"[A-Za-z0-9_.-]+", d)[0].lower().replace("_", "-") for d in wanted} - {"kvlab"}
    pins = [p for p in (ROOT / "constraints.txt").read_text().splitlines() if p.strip()]
    pinned = {p.split("==")[0].lower().replace("_", "-") for p in pins}
    assert names <= pinned
    assert not [p for p in pins if "+" in p or "@" in p or "file:" in p]
