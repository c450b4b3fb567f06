from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from loramux.adapters.identity import content_digest
from loramux.errors import AdapterInvalid
from tests.adapters.samples import config_bytes, matrices, tensor_bytes

DIGEST = content_digest(config_bytes(), tensor_bytes())


def reordered(tensors: dict[str, np.ndarray]) -> bytes:
    """The same tensors in the opposite order in the file, with metadata, and a header padded with blanks."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "who": "me"}}
    body = b""
    for name, tensor in reversed(tensors.items()):
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + tensor.nbytes]}
        body += tensor.tobytes()
    text = json.dumps(header).encode() + b"   "
    return struct.pack("<Q", len(text)) + text + body


def test_order_and_metadata_do_not_count() -> None:
    assert content_digest(config_bytes(), reordered(matrices())) == DIGEST
    assert content_digest(config_bytes(), save(matrices(), metadata={"format": "np"})) == DIGEST


@pytest.mark.parametrize(
    "changes",
    [
        {"base_model_name_or_path": "elsewhere"},
        {"lora_dropout": 0.5},
        {"inference_mode": True},
        {"peft_version": "9"},
        {"lora_alpha": 16.0},
        {"use_rslora": False},
        {"rank_pattern": {}},
    ],
)
def test_keys_that_do_not_change_inference_do_not_count(changes: dict[str, object]) -> None:
    assert content_digest(config_bytes(**changes), tensor_bytes()) == DIGEST


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 17},
        {"use_rslora": True},
        {"r": 8},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
    ],
)
def test_keys_that_change_inference_count(changes: dict[str, object]) -> None:
    assert content_digest(config_bytes(**changes), tensor_bytes()) != DIGEST


def test_the_order_of_patterns_counts() -> None:
    one = content_digest(config_bytes(alpha_pattern={"q_proj": 8, "proj": 2}), tensor_bytes())
    assert one != content_digest(config_bytes(alpha_pattern={"proj": 2, "q_proj": 8}), tensor_bytes())


@settings(deadline=None)
@given(st.data())
def test_any_changed_element_counts(data: st.DataObject) -> None:
    tensors = matrices()
    name = data.draw(st.sampled_from(sorted(tensors)))
    flat = tensors[name].reshape(-1).view(np.uint8)
    flat[data.draw(st.integers(0, flat.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert content_digest(config_bytes(), save(tensors)) != DIGEST


def test_name_shape_and_dtype_count() -> None:
    name, tensor = next(iter(matrices().items()))
    rest = {other: matrices()[other] for other in matrices() if other != name}
    digests = {
        content_digest(config_bytes(), save({**rest, name: tensor})),
        content_digest(config_bytes(), save({**rest, name + "x": tensor})),
        content_digest(config_bytes(), save({**rest, name: tensor.reshape(tensor.shape[::-1])})),
        content_digest(config_bytes(), save({**rest, name: tensor.view(np.int32)})),
    }
    assert len(digests) == 4


def test_what_cannot_be_read_has_no_digest() -> None:
    with pytest.raises(AdapterInvalid):
        content_digest(b"{", tensor_bytes())
    with pytest.raises(AdapterInvalid):
        content_digest(config_bytes(), b"")
