"""What an adapter is: identity, PEFT format, validation, content store, registry."""
