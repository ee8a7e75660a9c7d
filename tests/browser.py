"""Launches a real headless Chromium and serves small pages to it on 127.0.0.1; it asserts nothing about any page."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from tests.support import require

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@contextmanager
def browser_page(width: int = 1280, height: int = 800, *, strict: bool = True, **context: Any) -> Iterator[Any]:
    """A fresh page of that size (px); `context` goes to Playwright, such as reduced_motion="reduce".

    With `strict` an uncaught error of the page fails the test when the page closes.
    """
    chromium = require("chromium")
    from playwright.sync_api import sync_playwright

    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        try:
            page = browser.new_page(viewport={"width": width, "height": height}, **context)
            page.on("pageerror", lambda error: errors.append(str(error)))
            yield page
        finally:
            browser.close()
    assert not (strict and errors), errors


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """A test run is no place for access logs."""


class _Pages(BaseHTTPRequestHandler):
    """Serves a mapping of path -> content from memory."""

    def __init__(self, pages: Mapping[str, str], *args: Any) -> None:
        self.pages = pages
        super().__init__(*args)

    def do_GET(self) -> None:
        name = self.path.split("?")[0].lstrip("/")
        body = self.pages.get(name or "index.html")
        self.send_response(404 if body is None else 200)
        if body is not None:
            self.send_header("Content-Type", f"{guess_type(name or 'index.html')[0] or 'text/html'}; charset=utf-8")
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, *args: Any) -> None:
        """A test run is no place for access logs."""


@contextmanager
def serve(content: Path | str | Mapping[str, str]) -> Iterator[str]:
    """Serves a folder, one html page, or a mapping of file name -> text; yields its address, without a last slash.

    A mapping is read at each request, so a test may add files while it serves.
    """
    if isinstance(content, Path):
        handler: Any = partial(_Quiet, directory=str(content))
    else:
        handler = partial(_Pages, {"index.html": content} if isinstance(content, str) else content)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running_server(command: Sequence[str], ask: str, folder: Path, log: Path, **env: str) -> Iterator[None]:
    """A server process in `folder` that has answered at the address `ask`; AssertionError with its log if it died."""
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | env, stdout=out, stderr=out)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(ask, timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(30)
