"""The grouped expert MLP: formula, torch implementation, kernels, operator."""
