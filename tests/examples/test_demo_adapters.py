from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from peft import PeftModel
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks transformers

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("pirate", "sql", "tickets")
LORA_WIDTHS = {"q_proj": 576 + 576, "v_proj": 576 + 192, "o_proj": 576 + 576}
NUM_LAYERS = 30
RANK = 8


def held_out(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLES / "held_out" / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def base_like_the_demo_model() -> LlamaForCausalLM:
    """Attention of the demo model's size; the layers that the adapters leave alone are small."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 9, "num_key_value_heads": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=8, vocab_size=64)).eval()


def test_the_adapters_are_those_of_the_demo() -> None:
    assert tuple(sorted(path.name for path in (EXAMPLES / "adapters").iterdir())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_peft_loads_every_tensor_and_the_answer_changes(name: str, base_like_the_demo_model: LlamaForCausalLM) -> None:
    token_ids = torch.arange(16)[None]
    with torch.inference_mode():
        plain = base_like_the_demo_model(token_ids).logits
        model = PeftModel.from_pretrained(base_like_the_demo_model, str(EXAMPLES / "adapters" / name))
        adapted = model(token_ids).logits
    loaded = {key: value for key, value in model.state_dict().items() if "lora_B" in key}
    assert len(loaded) == len(LORA_WIDTHS) * NUM_LAYERS
    assert all(value.abs().max() > 0 for value in loaded.values())
    assert (adapted - plain).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_bfloat16_of_rank_8(name: str) -> None:
    with safe_open(EXAMPLES / "adapters" / name / "adapter_model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == NUM_LAYERS * RANK * sum(LORA_WIDTHS.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_names_the_base_and_no_path(name: str) -> None:
    directory = EXAMPLES / "adapters" / name
    assert sorted(path.name for path in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config.pop("base_model_name_or_path") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config["r"] == RANK
    assert not [key for key, value in config.items() if "/" in json.dumps(value)]


def test_held_out_tickets_fit_the_schema_in_its_order() -> None:
    schema = json.loads((EXAMPLES / "tickets.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    answers = [json.loads(line["answer"]) for line in held_out("tickets")]
    assert len(answers) >= 20
    for answer in answers:
        Draft202012Validator(schema).validate(answer)
        assert list(answer) == list(schema["properties"])


def test_the_first_request_asks_a_held_out_ticket_with_the_schema() -> None:
    request = json.loads((EXAMPLES / "request.json").read_text())
    assert request["messages"] == held_out("tickets")[0]["messages"]
    assert request["response_format"]["json_schema"]["schema"] == json.loads((EXAMPLES / "tickets.schema.json").read_text())


def test_held_out_queries_run_on_the_tables_of_the_prompt() -> None:
    lines = held_out("sql")
    assert len(lines) >= 20
    tables = lines[0]["messages"][0]["content"].split("over ", 1)[1]
    database = sqlite3.connect(":memory:")
    for table in tables.split("), "):
        database.execute(f"CREATE TABLE {table.rstrip(')')})")
    for line in lines:
        database.execute(line["answer"])
    database.close()
