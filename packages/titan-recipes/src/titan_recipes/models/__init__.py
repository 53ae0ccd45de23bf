"""Qwen3 as TorchTitan model specs, on each route."""
