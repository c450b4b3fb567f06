"""loramux: one base model, many LoRA adapters, many tenants, one OpenAI-compatible address."""

__version__ = "0.1.0"
