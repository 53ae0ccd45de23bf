"""What a run leaves behind: the Hugging Face folder, its reload, the loss curve."""
