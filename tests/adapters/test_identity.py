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
from tests.adapters.samples import PREFIX, config_bytes, matrices, tensor_bytes

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


def test_the_digest_of_a_standard_file_never_changes() -> None:
    """It is in the store's keys and in the directories of the content store."""
    config = {"r": 2, "lora_alpha": 3, "use_rslora": True, "rank_pattern": {"v_proj": 1}, "alpha_pattern": {"q_proj": 5, "proj": 7}}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{half}.weight": shape
        for layer in (0, 10)
        for module, rank in (("q_proj", 2), ("v_proj", 1))
        for half, shape in (("A", (rank, 4)), ("B", (6, rank)))
    }
    values = {
        name: (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + i).astype(np.float32 if i % 3 else np.float16)
        for i, (name, shape) in enumerate(tensors.items())
    }
    digest = content_digest(json.dumps(config).encode(), save(values))
    assert digest == "sha256:efc5367cfe5cd4e901cf5cd7113346b9c6f03eeb1a6315be2d6d85d0f73d9fa9"


@pytest.mark.parametrize("wrapped", ["module.base_model.model.", "", "base_model.model._orig_mod.", "base_model.model.base_model.model."])
def test_what_wrapped_the_model_does_not_count(wrapped: str) -> None:
    tensors = {wrapped + name.removeprefix(PREFIX): tensor for name, tensor in matrices().items()}
    assert content_digest(config_bytes(), save(tensors)) == DIGEST


def test_a_name_of_the_file_counts_where_it_changes_a_scale() -> None:
    wrapped = {name.replace("model.layers", "model.language_model.layers"): tensor for name, tensor in matrices().items()}
    matching = config_bytes(alpha_pattern={r"language_model\.layers\.0.*": 8})
    assert content_digest(config_bytes(), save(wrapped)) == DIGEST
    assert content_digest(matching, save(wrapped)) != content_digest(matching, tensor_bytes())
    other = config_bytes(alpha_pattern={r"text_model\.layers\.0.*": 8})
    assert content_digest(other, save(wrapped)) == content_digest(other, tensor_bytes())


def test_the_bases_own_matrices_do_not_count() -> None:
    saved = np.ones((384, 16), np.float32)
    for name in ("model.embed_tokens.base_layer.weight", "lm_head.weight"):
        assert content_digest(config_bytes(), save({**matrices(), PREFIX + name: saved})) == DIGEST
    assert content_digest(config_bytes(), save({**matrices(), PREFIX + "model.layers.0.mlp.up_proj.weight": saved})) != DIGEST
