"""The decoder of the Llama family: its configuration, weights and forward pass. Knows nothing of scheduling."""
