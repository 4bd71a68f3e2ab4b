"""memopt: FP8 GLM and Kimi checkpoints become INT4 releases that a serving fleet can trust."""

__version__ = "0.1.0"
