"""Variants of calibrated rounding, measured on SmolLM2 in one process: what brings how much."""
