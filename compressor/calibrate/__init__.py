"""Calibrated rounding: what a layer's inputs say about which errors matter."""
