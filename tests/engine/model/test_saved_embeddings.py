from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from loramux.engine.model.saved_embeddings import saved_weight_digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(37, 16), (1, 1), (4500, 1024)])
def test_digests_are_of_the_bytes_that_safetensors_writes(dtype: torch.dtype, shape: tuple[int, int], tmp_path: Path) -> None:
    """The largest is cast in several chunks."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    digests = saved_weight_digests(matrix)
    assert digests == saved_weight_digests(matrix.T.contiguous().T)
    for name, saved in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        save_file({"m": matrix.to(saved)}, tmp_path / "m.safetensors")
        ((_, entry),) = safetensors.deserialize((tmp_path / "m.safetensors").read_bytes())  # type: ignore[no-untyped-call]
        assert entry["dtype"] == name
        assert digests[name] == f"sha256:{hashlib.sha256(entry['data']).hexdigest()}"
