"""A checkpoint's tensors by their Hugging Face names, memory-mapped and checked as they are taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from loramux.errors import StartupFailed


class TensorSource(Protocol):
    """Where tensors come from. Names are Hugging Face's: `model.layers.0.self_attn.q_proj.weight`."""

    def names(self) -> Iterable[str]: ...

    def read(self, name: str) -> torch.Tensor:
        """Raises `StartupFailed` if the file does not hold what it promises."""


class Weights:
    """Hands out tensors of a known shape, and knows in the end what nobody asked for."""

    def __init__(self, source: TensorSource, device: torch.device, dtype: torch.dtype) -> None:
        self._source = source
        self._device = device
        self.dtype = dtype
        self._left = set(source.names())

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int, device: str | None = None) -> torch.Tensor:
        """The tensor on the device, or on the one given, in the model's dtype. Raises `StartupFailed` if it is missing or misshapen."""
        return self._checked(name, shape).to(device or self._device, self.dtype).contiguous()

    def take_fused(self, names: Iterable[str], rows: Iterable[int], *rest: int) -> torch.Tensor:
        """Tensors of shape [rows[i], *rest] stacked along their first dimension."""
        parts = [self._checked(name, (num_rows, *rest)) for name, num_rows in zip(names, rows, strict=True)]
        fused = torch.empty(sum(len(part) for part in parts), *rest, device=self._device, dtype=self.dtype)
        start = 0
        for part in parts:
            fused[start : start + len(part)] = part
            start += len(part)
        return fused

    def discard(self, suffix: str) -> None:
        """Tensors that the model has no use for."""
        self._left = {name for name in self._left if not name.endswith(suffix)}

    def refuse_leftovers(self) -> None:
        """Raises `StartupFailed` if the checkpoint has tensors that the model would ignore: its answers would be wrong."""
        if self._left:
            raise StartupFailed(f"the checkpoint has {len(self._left)} tensors this architecture does not use, such as {min(self._left)}")

    def _checked(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._left:
            raise StartupFailed(f"the checkpoint has no tensor {name}")
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise StartupFailed(f"tensor {name} is {list(tensor.shape)}, but the configuration asks for {list(shape)}")
        self._left.remove(name)
        return tensor


class SafetensorsSource:
    """One safetensors file or several; tensors are views of the mapped file until they are moved or cast."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            with _named(path):
                file: Any = safe_open(path, framework="pt")
                self._files.update(dict.fromkeys(file.keys(), (path, file)))

    def names(self) -> Iterable[str]:
        return self._files

    def read(self, name: str) -> torch.Tensor:
        path, file = self._files[name]
        with _named(path):
            tensor: torch.Tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise StartupFailed(f"tensor {name} in {path} is {tensor.dtype}; quantised checkpoints are not supported")
        return tensor


@contextlib.contextmanager
def _named(path: Path) -> Any:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise StartupFailed(f"{path} can't be read as safetensors ({error}); download it again") from error
