"""Turns the reviewed percent sources of the lessons into executed, byte-stable notebooks.

    python notebooks/build.py            execute all lessons
    python notebooks/build.py 05         only those whose name starts so
    python notebooks/build.py --check    compare sources only; exit 1 where a notebook is out of step

Pictures as PNG or JPEG and dead widget references are not stored; SVG and text stay, and nbval compares them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
DROPPED = ("application/vnd.jupyter.widget-view+json", "image/png", "image/jpeg")


def sources(prefix: str = "") -> list[Path]:
    """The lessons' percent sources, in order."""
    return sorted(p for p in HERE.glob("[0-9][0-9]_*.py") if p.name.startswith(prefix))


def read_source(path: Path) -> nbformat.NotebookNode:
    """A lesson as an unexecuted notebook with fixed cell ids."""
    notebook = jupytext.read(path)
    for i, cell in enumerate(notebook.cells):
        cell["id"] = f"c{i:03d}"
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def execute(path: Path) -> Path:
    """Run a lesson from its source and write the notebook beside it."""
    notebook = read_source(path)
    NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False, store_widget_state=False,
                   coalesce_streams=True, resources={"metadata": {"path": str(HERE)}}).execute()
    for key in ("widgets", "language_info"):
        notebook.metadata.pop(key, None)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            for mime in DROPPED:
                output.get("data", {}).pop(mime, None)
    out = path.with_suffix(".ipynb")
    nbformat.write(notebook, out)
    return out


def in_step(path: Path) -> bool:
    """Whether the executed notebook holds exactly the cells of its source."""
    out = path.with_suffix(".ipynb")
    if not out.exists():
        return False
    cells = [[(c.cell_type, c.source) for c in nb.cells] for nb in (read_source(path), nbformat.read(out, 4))]
    return cells[0] == cells[1]


def main(arguments: list[str]) -> int:
    prefix = "".join(a for a in arguments if not a.startswith("-"))
    if "--check" in arguments:
        behind = [p.name for p in sources(prefix) if not in_step(p)]
        print(f"out of step: {', '.join(behind)}" if behind else "all lessons in step")
        return int(bool(behind))
    for path in sources(prefix):
        print(execute(path).name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
