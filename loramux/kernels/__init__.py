"""One file per operation and device. Knows shapes, not models."""
