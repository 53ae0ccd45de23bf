"""The files of a checkpoint: what is written in them, and what can be trusted in them."""
