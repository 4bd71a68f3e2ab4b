"""The GPU benchmark: correctness, time and share of the device's bounds for every kernel."""
