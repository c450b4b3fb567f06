"""The base's embedding and output matrices that peft saves beside adapters of them: applied by nobody, so they must be the base's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from loramux.adapters.peft_tensors import AdapterTensor
from loramux.adapters.types import BaseDescription


def replaced_weights(saved: Iterable[AdapterTensor], base: BaseDescription) -> Iterator[str]:
    """An error for each matrix that is not the base's."""
    return (
        f"{tensor.name}: another matrix than the base's; replaced embeddings are not supported"
        for tensor in saved
        if not _is_of(base, tensor)
    )


def _is_of(base: BaseDescription, tensor: AdapterTensor) -> bool:
    module = tensor.name.removesuffix(".weight")
    shape, digests = base.modules.get(module), base.saved_weight_digests.get(module, {})
    if shape is None:
        return False
    rows_and_columns = (shape.in_features, shape.out_features) if shape.kind == "embedding" else (shape.out_features, shape.in_features)
    return tensor.shape == rows_and_columns and digests.get(tensor.dtype) == f"sha256:{hashlib.sha256(tensor.data).hexdigest()}"
