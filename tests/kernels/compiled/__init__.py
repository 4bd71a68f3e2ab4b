"""The ahead-of-time gate: every kernel compiled for real targets at production shapes, and held to a budget."""
