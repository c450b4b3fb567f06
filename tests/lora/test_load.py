from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from loramux.adapters.types import ModuleShape
from loramux.errors import AdapterInvalid
from loramux.kernels.reference.lora import ReferenceLoraSlots
from loramux.lora.load import load_host_adapter
from loramux.lora.types import HostAdapter, LoraSite, LoraSlice
from tests.lora.random_adapters import ALL_LINEAR, write_random_adapter

HIDDEN, INNER, KV = 32, 48, 16
ATTENTION, MLP = "model.layers.{}.self_attn.", "model.layers.{}.mlp."


def _sites(layer: int) -> list[LoraSite]:
    attention, mlp, first = ATTENTION.format(layer), MLP.format(layer), 4 * layer
    qkv = (
        LoraSlice(attention + "q_proj", 0, HIDDEN),
        LoraSlice(attention + "k_proj", HIDDEN, HIDDEN + KV),
        LoraSlice(attention + "v_proj", HIDDEN + KV, HIDDEN + 2 * KV),
    )
    gate_up = (LoraSlice(mlp + "gate_proj", 0, INNER), LoraSlice(mlp + "up_proj", INNER, 2 * INNER))
    return [
        LoraSite(first, attention + "qkv_proj", HIDDEN, qkv),
        LoraSite(first + 1, attention + "o_proj", HIDDEN, (LoraSlice(attention + "o_proj", 0, HIDDEN),)),
        LoraSite(first + 2, mlp + "gate_up_proj", HIDDEN, gate_up),
        LoraSite(first + 3, mlp + "down_proj", INNER, (LoraSlice(mlp + "down_proj", 0, HIDDEN),)),
    ]


SITES = tuple(site for layer in range(2) for site in _sites(layer))


@dataclass(frozen=True)
class Base:
    """A model that is only its layers' sizes; implements `LoraBase`."""

    sites: tuple[LoraSite, ...] = SITES
    dtype: torch.dtype = torch.float32

    @property
    def modules(self) -> dict[str, ModuleShape]:
        return {part.module: ModuleShape(site.in_features, part.out_end - part.out_start) for site in SITES for part in site.slices}

    def module_weight(self, module: str) -> torch.Tensor:
        shape = self.modules[module]
        return torch.ones(shape.out_features, shape.in_features, dtype=self.dtype)

    def module_bias(self, module: str) -> torch.Tensor | None:
        return None


def load_adapter(digest: str, contents: tuple[bytes, bytes], base: Base | None = None) -> HostAdapter:
    return load_host_adapter(digest, *contents, base or Base(), ReferenceLoraSlots())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


def read(directory: Path) -> tuple[bytes, bytes]:
    return (directory / "adapter_config.json").read_bytes(), (directory / "adapter_model.safetensors").read_bytes()


def deltas(adapter: HostAdapter) -> dict[str, torch.Tensor]:
    """B A of every module, from the packed form."""
    found = {}
    for site in SITES:
        weights = adapter.weights.sites[site.number]
        for part in weights.slices if weights else ():
            (module,) = [each.module for each in site.slices if (each.out_start, each.out_end) == (part.out_start, part.out_end)]
            found[module] = part.b.float().T @ weights.a[part.rank_start : part.rank_end].float() if weights else torch.empty(0)
    return found


def expected(tensors: bytes, scale: float) -> dict[str, torch.Tensor]:
    loaded = {name.removeprefix("base_model.model."): tensor.float() for name, tensor in load(tensors).items()}
    modules = {name.removesuffix(".lora_A.weight") for name in loaded if "lora_A" in name}
    return {name: scale * loaded[f"{name}.lora_B.weight"] @ loaded[f"{name}.lora_A.weight"] for name in modules}


@pytest.mark.parametrize("modules", [ALL_LINEAR, ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("down_proj",), ("o_proj", "gate_proj")])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_packed_form_is_the_adapter(model_dir: Path, tmp_path: Path, modules: tuple[str, ...], rslora: bool) -> None:
    contents = read(write_random_adapter(tmp_path / "a", model_dir, rank=4, modules=modules, rslora=rslora, alpha=12, seed=1))
    adapter = load_adapter("sha256:x", contents)
    want = expected(contents[1], 12 / 2 if rslora else 12 / 4)
    got = deltas(adapter)
    assert got.keys() == want.keys()
    for module in want:
        torch.testing.assert_close(got[module], want[module], rtol=1e-5, atol=1e-5)
    assert (adapter.digest, adapter.rank) == ("sha256:x", 4)


def test_one_aligned_buffer(model_dir: Path, tmp_path: Path) -> None:
    contents = read(write_random_adapter(tmp_path / "a", model_dir, rank=3, modules=ALL_LINEAR, seed=1))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        adapter = load_adapter("", contents, Base(dtype=dtype))
        matrices = [m for weights in adapter.weights.sites if weights for m in (weights.a, *(part.b for part in weights.slices))]
        assert len({matrix.untyped_storage().data_ptr() for matrix in matrices}) == 1
        assert all(matrix.is_contiguous() and matrix.data_ptr() % 64 == 0 and matrix.dtype == dtype for matrix in matrices)
        assert adapter.num_bytes == matrices[0].untyped_storage().nbytes()
        spans = sorted((m.data_ptr(), m.data_ptr() + m.nbytes) for m in matrices)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert spans[-1][1] <= matrices[0].untyped_storage().data_ptr() + adapter.num_bytes


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_every_stored_dtype_and_the_scale_before_the_cast(model_dir: Path, tmp_path: Path, stored: torch.dtype) -> None:
    directory = write_random_adapter(tmp_path / "a", model_dir, rank=4, modules=("q_proj",), alpha=5, seed=2)
    config, tensors = read(directory)
    cast = {name: tensor.to(stored) for name, tensor in load(tensors).items()}
    adapter = load_adapter("", (config, save(cast)), Base(dtype=torch.bfloat16))
    weights = adapter.weights.sites[0]
    assert weights is not None
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    assert torch.equal(weights.a, cast[name.format("A")].to(torch.bfloat16))
    assert torch.equal(weights.slices[0].b, (cast[name.format("B")].float() * 1.25).to(torch.bfloat16).T)


def test_patterns_and_partial_layers(model_dir: Path, tmp_path: Path) -> None:
    config, tensors = read(
        write_random_adapter(tmp_path / "a", model_dir, rank=4, modules=("q_proj", "v_proj"), layers=(1,), alpha=8, seed=3)
    )
    changed = json.loads(config) | {"r": 2, "rank_pattern": {"q_proj": 4, "layers.1.self_attn.v_proj": 4}, "alpha_pattern": {"v_proj": 2}}
    adapter = load_adapter("", (json.dumps(changed).encode(), tensors))
    assert [index for index, weights in enumerate(adapter.weights.sites) if weights] == [4]
    plain, got = expected(tensors, 1.0), deltas(adapter)
    for module, scale in (("model.layers.1.self_attn.q_proj", 2.0), ("model.layers.1.self_attn.v_proj", 0.5)):
        torch.testing.assert_close(got[module], scale * plain[module], rtol=1e-5, atol=1e-5)


def test_what_has_no_place_is_refused(model_dir: Path, tmp_path: Path) -> None:
    contents = read(write_random_adapter(tmp_path / "a", model_dir, rank=4, modules=("q_proj", "down_proj"), seed=4))
    with pytest.raises(AdapterInvalid, match="no place"):
        load_adapter("", contents, Base(sites=SITES[:1] + SITES[4:]))
    wide = read(write_random_adapter(tmp_path / "b", model_dir, rank=4, modules=("q_proj",), seed=4, in_features_delta=8))
    with pytest.raises(AdapterInvalid, match="q_proj"):
        load_adapter("", wide)
    with pytest.raises(AdapterInvalid):
        load_adapter("", (contents[0], save({})))
