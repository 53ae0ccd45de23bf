"""The training loop: TorchTitan's trainer with hooks, and what watches it."""
