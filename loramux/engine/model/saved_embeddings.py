"""Digests of the base's embedding and output matrices, by which a gateway knows the copies that peft saves beside adapters of them."""

from __future__ import annotations

import hashlib

import torch

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_ELEMENTS = 1 << 22


def saved_weight_digests(tensor: torch.Tensor) -> dict[str, str]:
    """`BaseDescription.saved_weight_digests` of one matrix [rows, columns] of any float dtype and device.

    A few rows are cast at a time, so that no whole copy is made. Hashing takes 8 bytes an element in all.
    """
    digests = {name: hashlib.sha256() for name in _DTYPES}
    num_rows = max(1, _CHUNK_ELEMENTS // tensor.shape[1])
    for start in range(0, tensor.shape[0], num_rows):
        for name, dtype in _DTYPES.items():
            digests[name].update(tensor[start : start + num_rows].to("cpu", dtype).contiguous().view(torch.uint8).numpy())
    return {name: f"sha256:{digest.hexdigest()}" for name, digest in digests.items()}
