"""From files and datasets to batches of one constant shape."""
