"""policy="sglang-0.5.11" beside the pinned source, where it is unpacked: same hits, splits, victims and counters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT, peer


def test_random_histories_agree_with_the_pinned_source():
    if not peer("sglang"):
        message = "kvlab: not here: SGLang v0.5.11, unpacked in a folder of KVLAB_PEERS"
        print(message)
        pytest.skip(message)
    done = subprocess.run([sys.executable, "-m", "tests.reuse.sglang_peer", "1"], cwd=ROOT, text=True,
                          capture_output=True, timeout=300, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.stdout.splitlines()[-1:] == ["agreed 21"], done.stderr[-2000:]
