"""A whole forward pass with adapters that peft saved and the loader read, in pages, against the default operations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from loramux.adapters.identity import content_digest
from loramux.kernels.ops import LoraLimits, LoraPlan, LoraSlots, SlotRows
from loramux.kernels.triton.ops import TritonOps
from loramux.lora.load import load_host_adapter
from tests.parity.harness import Harness, Run, open_model
from tests.parity.served import ALL_LINEAR, Served, random_prompt, serve
from tests.parity.test_model import llama

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
EVERYTHING = [*ALL_LINEAR, "embed_tokens", "lm_head"]
CONFIGS = {
    "dora": {"r": 9, "lora_alpha": 10, "target_modules": EVERYTHING, "use_dora": True, "rank_pattern": {"embed_tokens": 3, "q_proj": 17}},
    "some": {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "down_proj"]},
}


class Paged:
    """Slots whose pages are given out here, as the engine's slot table does it; slots of one adapter share its pages."""

    def __init__(self, slots: LoraSlots, adapters: Sequence[tuple[object, int]]) -> None:
        self._slots = slots
        self._pages: dict[int, tuple[int, ...]] = {}
        page = 0
        for weights, num_pages in adapters:
            self._pages[id(weights)] = tuple(range(page, page + num_pages))
            page += num_pages

    def plan(self, rows: Sequence[SlotRows]) -> LoraPlan:
        return self._slots.plan([each._replace(pages=self._pages[id(each.weights)]) for each in rows])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("paged"), llama(), CONFIGS)


def logits(served: Served, prompts: Sequence[list[int]], names: Sequence[str | None], slots: Paged | None) -> list[torch.Tensor]:
    harness = Harness(served.model)
    if slots is not None:
        harness.slots = slots
    runs = [Run(harness.sequence(prompt, 64, served.adapter(name)), len(prompt)) for prompt, name in zip(prompts, names, strict=True)]
    return harness.step(runs, all_rows=True)


def test_a_mixed_batch_equals_the_default_operations(served: Served, tmp_path: Path) -> None:
    ops = TritonOps("cpu")
    slots = ops.lora_slots(served.model.lora_shape, LoraLimits(num_slots=5, max_rank=24, max_num_tokens=64))
    paged = {}
    for name, directory in served.directories.items():
        files = [(directory / file).read_bytes() for file in ("adapter_config.json", "adapter_model.safetensors")]
        paged[name] = load_host_adapter(content_digest(files[0], files[1]), files[0], files[1], served.model, slots)
    assert {name: adapter.num_pages for name, adapter in paged.items()} == {"dora": 3 + 1, "some": 1}
    rng = random.Random(31)
    names = ["dora", None, "some", "dora", "some"]
    prompts = [random_prompt(rng, served.model, num_tokens) for num_tokens in (7, 3, 1, 1, 9)]
    pool = Paged(slots, [(adapter.weights, adapter.num_pages) for adapter in paged.values()])
    got = logits(served._replace(model=open_model(served.checkpoint, tmp_path, ops=ops), adapters=paged), prompts, names, pool)
    want = logits(served, prompts, names, None)
    for found, expected in zip(got, want, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
