"""The guard around nbval: lessons are executed, in step with their sources, and hold outputs that are compared."""

from __future__ import annotations

import importlib.util

import nbformat
import pytest

from tests.support import ROOT

spec = importlib.util.spec_from_file_location("build", ROOT / "notebooks" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

LESSONS = build.sources()
IGNORING = {"nbval-ignore-output", "nbval-skip"}
MARKERS = ("NBVAL_IGNORE_OUTPUT", "NBVAL_SKIP")


def compared_outputs(notebook) -> int:
    """Cells whose stored output nbval really compares: text or SVG, and not told to ignore it."""
    count = 0
    for cell in notebook.cells:
        if cell.cell_type != "code" or any(m in cell.source for m in MARKERS):
            continue
        if IGNORING & set(cell.metadata.get("tags", ())):
            continue
        kinds = [o for o in cell.outputs if o.output_type == "stream" or set(o.get("data", {})) - {"image/png"}]
        count += bool(kinds)
    return count


def guard(notebook) -> list[str]:
    """What is wrong with a stored notebook; empty where it is a real, executed lesson."""
    code = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    wrong = [f"cell {c.id} never ran" for c in code if c.execution_count is None]
    wrong += [f"cell {c.id} failed" for c in code for o in c.outputs if o.output_type == "error"]
    if [c.execution_count for c in code] != list(range(1, len(code) + 1)):
        wrong.append("cells ran out of order")
    if compared_outputs(notebook) < max(8, len(code) // 2):
        wrong.append(f"only {compared_outputs(notebook)} of {len(code)} code cells hold compared output")
    return wrong


def test_there_are_lessons():
    assert LESSONS


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_lesson_is_executed_and_in_step(path):
    assert build.in_step(path), f"make notebooks: {path.name} has changed"
    assert guard(nbformat.read(path.with_suffix(".ipynb"), 4)) == []


@pytest.mark.parametrize("path", LESSONS[:1], ids=lambda p: p.stem)
def test_the_guard_catches_a_stripped_notebook(path):
    notebook = nbformat.read(path.with_suffix(".ipynb"), 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    assert guard(notebook)


@pytest.mark.parametrize("path", LESSONS[:1], ids=lambda p: p.stem)
def test_a_changed_source_is_out_of_step(path, tmp_path):
    copied = tmp_path / path.name
    copied.write_text(path.read_text().replace("# %%", "# %%\nassert True\n# %%", 1))
    copied.with_suffix(".ipynb").write_bytes(path.with_suffix(".ipynb").read_bytes())
    assert not build.in_step(copied)
