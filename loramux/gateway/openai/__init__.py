"""The OpenAI-compatible routes: wire models, translation to engine requests, responses and streams."""
