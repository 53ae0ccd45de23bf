"""Choose the device once and tell TorchTitan about it."""
