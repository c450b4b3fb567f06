"""Train the demo adapters on a CPU and print what they change: `python examples/train_demo_adapters.py [--only tickets]`.

The base is the demo model that `loramux demo --fetch-only` fetches. Each adapter is a rank 8 LoRA on the query, value and output
projections, trained on the answers only, in the model's own chat format, and saved in bfloat16 as peft writes it. It is measured as
saved: read back from disk, greedy decoding.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import demo_tasks
import torch
from demo_tasks import Example
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from loramux.gateway.cli.demo_model import demo_model_path

HERE = Path(__file__).parent
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SEED = 7
NUM_HELD_OUT = 24
BATCH_SIZE = 4
PEAK_LEARNING_RATE = 2e-3
MAX_ANSWER_TOKENS = 64


class Task(NamedTuple):
    name: str
    train: list[Example]
    held_out: list[Example]
    judge: Callable[[str, str], bool]
    measure: str


class Base(NamedTuple):
    model: Any
    tokenizer: Any

    def prompt_ids(self, example: Example) -> list[int]:
        text = self.tokenizer.apply_chat_template(example.messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer_ids(self, example: Example) -> list[int]:
        return list(self.tokenizer(example.answer + "<|im_end|>", add_special_tokens=False)["input_ids"])


def load_base(path: Path) -> Base:
    files: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**files, dtype=torch.float32)
    model.config.name_or_path = BASE_NAME
    return Base(model, AutoTokenizer.from_pretrained(**files))


def left_padded(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    """[len(rows), longest row] int64, each row at the right edge."""
    width = max(map(len, rows))
    return torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows])


@torch.inference_mode()
def answer(base: Base, model: Any, examples: Sequence[Example]) -> list[str]:
    """Greedy answers, in order."""
    texts: list[str] = []
    for start in range(0, len(examples), 24):
        prompts = [base.prompt_ids(example) for example in examples[start : start + 24]]
        ids, mask = left_padded(prompts, base.tokenizer.eos_token_id), left_padded([[1] * len(row) for row in prompts], 0)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=MAX_ANSWER_TOKENS,
            eos_token_id=base.tokenizer.eos_token_id,
            pad_token_id=base.tokenizer.eos_token_id,
        )
        texts += base.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return texts


def answer_loss(base: Base, model: Any, examples: Sequence[Example]) -> torch.Tensor:
    """Mean cross entropy over the tokens of the answers; logits are computed only where one of them is predicted."""
    answers = [base.answer_ids(example) for example in examples]
    rows = [base.prompt_ids(example) + ids for example, ids in zip(examples, answers, strict=True)]
    labels = left_padded(answers, -100)
    mask = left_padded([[1] * len(row) for row in rows], 0)
    inputs = left_padded(rows, base.tokenizer.eos_token_id)
    logits = model(input_ids=inputs, attention_mask=mask, use_cache=False, logits_to_keep=labels.shape[1] + 1).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())


def learning_rate(step: int, num_steps: int) -> float:
    """Ten steps up, then straight down."""
    return PEAK_LEARNING_RATE * min((step + 1) / 10, (num_steps - step) / num_steps)


def train(base: Base, model: Any, examples: Sequence[Example], num_steps: int) -> None:
    rng = random.Random(SEED)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    started = time.monotonic()
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, num_steps)
        loss = answer_loss(base, model, rng.sample(list(examples), BATCH_SIZE))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 5 == 0 or step == num_steps - 1:
            print(f"  step {step:3}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)


def train_adapter(base: Base, task: Task, num_steps: int) -> None:
    """Train on `task` and save to `examples/adapters/<name>`. `base.model` itself is left unchanged."""
    torch.manual_seed(SEED)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base.model, config)
    train(base, model, task.train, num_steps)
    folder = HERE / "adapters" / task.name
    model.save_pretrained(str(folder))
    model.unload()
    (folder / "README.md").unlink(missing_ok=True)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings |= {"base_model_name_or_path": BASE_NAME, "target_modules": sorted(settings["target_modules"])}
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def score(task: Task, texts: Sequence[str]) -> int:
    return sum(task.judge(text, example.answer) for text, example in zip(texts, task.held_out, strict=True))


def measure(base: Base, task: Task) -> None:
    before = answer(base, base.model, task.held_out)
    adapted = PeftModel.from_pretrained(base.model, str(HERE / "adapters" / task.name))
    after = answer(base, adapted.eval(), task.held_out)
    adapted.unload()
    count = len(task.held_out)
    print(f"{task.name}: {task.measure}: base {score(task, before)}/{count}, adapter {score(task, after)}/{count}")
    for example, text_before, text_after in list(zip(task.held_out, before, after, strict=True))[:3]:
        print(f"  asked    {example.user!r}\n  base     {text_before!r}\n  adapter  {text_after!r}", flush=True)


def write_held_out(task: Task) -> None:
    lines = [json.dumps({"messages": example.messages, "answer": example.answer}) for example in task.held_out]
    (HERE / "held_out" / f"{task.name}.jsonl").write_text("\n".join(lines) + "\n")


def write_first_request(task: Task) -> None:
    """The body that `loramux demo` prints: the first held-out ticket, with the schema of the answer."""
    (HERE / "tickets.schema.json").write_text(json.dumps(demo_tasks.TICKETS_SCHEMA, indent=2) + "\n")
    constraint = {"name": "ticket", "strict": True, "schema": demo_tasks.TICKETS_SCHEMA}
    body = {
        "model": "smollm2-135m:tickets",
        "temperature": 0,
        "messages": task.held_out[0].messages,
        "response_format": {"type": "json_schema", "json_schema": constraint},
    }
    (HERE / "request.json").write_text(json.dumps(body, indent=2) + "\n")


def make_task(base: Base, name: str) -> Task:
    rng = random.Random(SEED)
    if name == "tickets":
        return Task(name, *demo_tasks.tickets(rng, 800, NUM_HELD_OUT), demo_tasks.same_json, "exact match")
    if name == "sql":
        return Task(name, *demo_tasks.sql(rng, 600, NUM_HELD_OUT), demo_tasks.same_sql, "exact match")
    prompts, held_out = demo_tasks.pirate_prompts(rng)
    plain = answer(base, base.model, prompts)
    taught = [prompt._replace(answer=demo_tasks.pirate_answer(text, rng)) for prompt, text in zip(prompts, plain, strict=True)]
    return Task(name, taught, held_out, lambda got, _: demo_tasks.is_pirate(got), "two or more pirate words")


STEPS = {"tickets": 130, "sql": 50, "pirate": 40}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=STEPS, action="append", help="make this one (may be repeated); else all three")
    parser.add_argument("--model", type=Path, help="the GGUF file, if not the one that `loramux demo --fetch-only` fetched")
    parser.add_argument("--measure-only", action="store_true", help="measure the adapters that are there")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = load_base(args.model or demo_model_path())
    for name in args.only or STEPS:
        print(f"{name}:", flush=True)
        task = make_task(base, name)
        if not args.measure_only:
            write_held_out(task)
            if name == "tickets":
                write_first_request(task)
            train_adapter(base, task, STEPS[name])
        measure(base, task)


if __name__ == "__main__":
    main()
