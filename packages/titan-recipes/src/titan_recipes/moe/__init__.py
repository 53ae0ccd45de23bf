"""Mixtures of experts: the layer, its router, its dispatchers and its kernels."""
