"""How a test opens a page without a browser, and what the stage on it was told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streamlit.testing.v1 import AppTest

from tests.support import ROOT


def open_page(name: str, query: Mapping[str, str] | None = None) -> AppTest:
    """Run one file of `app/` as if the address had this query."""
    at = AppTest.from_file(str(ROOT / "app" / name), default_timeout=120)
    for key, value in (query or {}).items():
        at.query_params[key] = value
    return at.run()


def stage_of(at: AppTest) -> dict[str, Any]:
    """Recording, frame and seek token that went to the one stage of the page."""
    assert not at.exception, at.exception
    (element,) = at.get("bidi_component")
    return dict(zip(("recording", "frame", "report", "seek"), json.loads(element.proto.json), strict=True))
