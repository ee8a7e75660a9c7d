"""Reads GGUF files (versions 2 and 3): header, tensor list, tensor values; it knows nothing of models.

The `gguf` package needs seconds to wrap the hundred thousand strings of a vocabulary and dequantises on one
core, so the header and the common formats are read here; the package serves the rarer quantisations.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.execution.model_config import ModelFileError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_F32, _F16, _Q4_0, _Q4_1, _Q8_0, _BF16 = 0, 1, 2, 3, 8, 30
_PLAIN = {_F32: torch.float32, _F16: torch.float16, _BF16: torch.bfloat16}
# ggml type -> (weights in a block, bytes of a block)
_BLOCKS = {_F32: (1, 4), _F16: (1, 2), _BF16: (1, 2), _Q4_0: (32, 18), _Q4_1: (32, 20), _Q8_0: (32, 34)}


class _Cursor:
    """A position in the header's bytes. Reading beyond the end raises struct.error."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 4

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        # The hot loop of loading: a vocabulary and its merges are some hundred thousand strings.
        unpack, data, at, out = struct.Struct("<Q").unpack_from, self.data, self.at, []
        for _ in range(count):
            (length,) = unpack(data, at)
            at += 8 + length
            out.append(str(data[at - length : at], "utf-8", "replace"))
        self.at = at
        return out

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self.texts(count)
        if kind == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        numbers = np.frombuffer(self.data, "<" + _SCALARS[kind], count, self.at)
        self.at += numbers.nbytes
        return numbers.tolist()


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: `shape` with the fastest axis last (torch's order), bytes `[begin, end)` of the file."""

    shape: tuple[int, ...]
    kind: int
    begin: int
    end: int


class GgufFile:
    """A GGUF file, mapped: `metadata` as plain Python values, `tensors` by name.

    ModelFileError where the file is missing, cut off or not a GGUF file. Cost: the header's strings once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.memmap(path, np.uint8, "c")  # "c": torch wants memory it may write to, the file stays
        except (OSError, ValueError):
            raise ModelFileError(path, "a readable GGUF file") from None
        data = memoryview(self._bytes)
        if bytes(data[:4]) != b"GGUF":
            raise ModelFileError(path, "a GGUF file, which begins with the four letters GGUF")
        try:
            self.metadata, self.tensors = self._header(_Cursor(data))
        except (struct.error, KeyError, ValueError, OverflowError, MemoryError):
            raise ModelFileError(path, "a complete GGUF header (the file is cut off or damaged)") from None
        for name, tensor in self.tensors.items():
            if tensor.end > len(data):
                raise ModelFileError(path, f"{tensor.end} bytes for the tensor {name}, not {len(data)} (cut off)")

    def _header(self, at: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version = at.number("I")
        if version not in (2, 3):
            raise ModelFileError(self.path, f"GGUF version 2 or 3, little-endian, not {version}")
        tensor_count, pair_count = at.number("Q"), at.number("Q")
        pairs = {at.text(): at.value(at.number("I")) for _ in range(pair_count)}
        listed = []
        for _ in range(tensor_count):
            name, axes = at.text(), at.number("I")
            shape = tuple(at.number("Q") for _ in range(axes))[::-1]
            listed.append((name, shape, at.number("I"), at.number("Q")))
        step = pairs.get("general.alignment", 32)
        start = -(-at.at // step) * step
        return pairs, {n: self._locate(n, shape, kind, start + offset) for n, shape, kind, offset in listed}

    def _locate(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        weights, size = _BLOCKS.get(kind) or self._rare_block(name, kind)
        if shape[-1] % weights:
            raise ModelFileError(self.path, f"rows of the tensor {name} in whole blocks of {weights} weights")
        return GgufTensor(shape, kind, begin, begin + math.prod(shape) // weights * size)

    def _rare_block(self, name: str, kind: int) -> tuple[int, int]:
        from gguf import GGML_QUANT_SIZES  # slow to import, and most files do not need it

        try:
            return GGML_QUANT_SIZES[kind]
        except KeyError:
            message = f"a known quantisation: the tensor {name} has the unsupported ggml type {kind}"
            raise ModelFileError(self.path, message) from None

    def fill(self, name: str, dest: Tensor) -> None:
        """Write the tensor `name`, a vector `[n]` or a matrix `[out, in]`, into `dest` in its dtype.

        ModelFileError where the file has no such tensor, another shape, or an unsupported quantisation.
        """
        tensor, wanted = self.tensors.get(name), tuple(dest.shape)
        if tensor is None:
            raise ModelFileError(self.path, f"the tensor {name}")
        if tensor.shape != wanted:
            raise ModelFileError(self.path, f"the tensor {name} with shape {list(wanted)}, not {list(tensor.shape)}")
        raw = torch.from_numpy(self._bytes[tensor.begin : tensor.end])
        if plain := _PLAIN.get(tensor.kind):
            dest.copy_(raw.view(plain).view(tensor.shape))
        elif tensor.kind in _BLOCKS:
            exact = dest if dest.dtype == torch.float32 and dest.is_contiguous() else torch.empty(dest.shape)
            _dequantise(tensor.kind, raw.view(-1, _BLOCKS[tensor.kind][1]), exact)
            if exact is not dest:
                dest.copy_(exact)
        else:
            dest.copy_(self._rare(name, tensor))

    def _rare(self, name: str, tensor: GgufTensor) -> Tensor:
        from gguf import GGMLQuantizationType, quants

        rows = self._bytes[tensor.begin : tensor.end].reshape(*tensor.shape[:-1], -1)
        try:
            return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType(tensor.kind)))
        except NotImplementedError:
            kind = GGMLQuantizationType(tensor.kind).name
            raise ModelFileError(self.path, f"a supported quantisation of the tensor {name}, not {kind}") from None


def _dequantise(kind: int, blocks: Tensor, dest: Tensor) -> None:
    """Blocks `[n, bytes]` of Q4_0, Q4_1 or Q8_0, 32 weights each -> float32 `dest`, exactly as llama.cpp does."""
    weights, scale = dest.view(-1, 32), _halves(blocks, 0)
    if kind == _Q8_0:
        torch.mul(blocks[:, 2:].view(torch.int8), scale, out=weights)
        return
    offset, begin = (_halves(blocks, 2), 4) if kind == _Q4_1 else (scale * -8, 2)
    torch.mul(blocks[:, begin:] & 15, scale, out=weights[:, :16])
    torch.mul(blocks[:, begin:] >> 4, scale, out=weights[:, 16:])
    weights.add_(offset)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of every block, as float32 `[n, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()
