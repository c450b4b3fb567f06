"""Scheduling, KV blocks, prefix cache, model forward, sampling, the engine process and its client."""
