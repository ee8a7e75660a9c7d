"""A page that is run alone finds its parts where the whole app would have them."""

import pytest

from tests.support import ROOT


@pytest.fixture(autouse=True)
def beside_its_parts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "app"))
