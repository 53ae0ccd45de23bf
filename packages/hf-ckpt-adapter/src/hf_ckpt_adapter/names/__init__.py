"""What a Qwen3 tensor is called in each place it lives, and how its rows are folded there."""
