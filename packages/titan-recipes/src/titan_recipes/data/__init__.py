"""Data's way from files and datasets to batches of one constant shape."""
