"""Rotary position embedding: formula, kernel, operator."""
