"""A lesson in a real JupyterLab: its cells run, the stage stands, and the keyboard moves a block to another row."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser import browser_page, free_port, running_server
from tests.notebooks.test_lessons import build
from tests.support import ROOT, require

pytestmark = pytest.mark.browser

TOKEN = "lesson"
OUT = ROOT / "tests" / "out"
PATIENCE = 120_000  # ms; the kernel imports torch, and the machine may be busy

READY = """async () => {
  const notebook = window.jupyterapp.shell.currentWidget;
  await notebook.context.ready;
  await notebook.sessionContext.ready;
  await notebook.sessionContext.session.kernel.info;
}"""
RUN_ALL = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }"
RAN = "document.querySelector('.jp-Notebook-ExecutionIndicator').dataset.status === 'idle'"
PLACES = """() => Object.fromEntries([...document.querySelectorAll('.kvs [data-key]')].map(
  shape => [shape.dataset.key, shape.getAttribute('transform')]))"""


@contextmanager
def jupyter_lab(folder: Path) -> Iterator[str]:
    """A JupyterLab over `folder`, with settings of its own; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1",
               "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}",
               "--LabApp.expose_app_in_browser=True"]
    quiet = folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    own = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    own |= {"PYTHONPATH": str(ROOT), "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces")}
    address = f"http://127.0.0.1:{port}"
    with running_server(command, f"{address}/api?token={TOKEN}", folder, folder / "server.log", **own):
        yield address


def until_the_stage(path: Path) -> nbformat.NotebookNode:
    """A lesson's cells up to its first stage, without outputs."""
    notebook = build.read_source(path)
    last = next(n for n, c in enumerate(notebook.cells) if c.cell_type == "code" and "widget(recording" in c.source)
    notebook.cells = notebook.cells[: last + 1]
    return notebook


def height(transform: str) -> float:
    """The y of a `translate(x,y)`."""
    return float(re.fullmatch(r"translate\(([-\d.]+),([-\d.]+)\)", transform)[2])


def rest(page: Any, frame: int) -> dict[str, str]:
    """Where every shape of the stage stands, once it rests on a frame."""
    page.wait_for_selector(f".kvs[data-rest='{frame}']")
    return page.evaluate(PLACES)


def test_the_keyboard_moves_a_block_in_jupyterlab(tmp_path: Path) -> None:
    require("chromium")
    nbformat.write(until_the_stage(build.sources("05")[0]), tmp_path / "lesson.ipynb")
    with jupyter_lab(tmp_path) as address, browser_page(1280, 900, strict=False) as page:
        page.set_default_timeout(PATIENCE)
        page.goto(f"{address}/doc/tree/lesson.ipynb?token={TOKEN}")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        page.evaluate(READY)
        page.evaluate(RUN_ALL)
        page.wait_for_selector(".kvs[data-rest]")
        page.wait_for_function(RAN)
        stage = page.locator(".kvs")
        stage.scroll_into_view_if_needed()
        start = int(stage.get_attribute("data-rest"))
        stage.focus()
        before = rest(page, start)
        page.keyboard.press("ArrowRight")
        reserved = rest(page, start + 1)
        OUT.mkdir(exist_ok=True)
        page.screenshot(path=OUT / "lesson_05_lab.png")
        page.keyboard.press("ArrowLeft")
        back = rest(page, start)
    rows = {key: (height(at), height(reserved[key])) for key, at in before.items() if key in reserved}
    moved = {key: row for key, row in rows.items() if key.startswith("b.g0.") and row[0] != row[1]}
    assert len(moved) == 1, f"one block goes from the free queue down to the staged row, not {moved}"
    ((free, staged),) = moved.values()
    assert staged - free > 54, "the rows are further apart than a block is high"
    assert back == before
