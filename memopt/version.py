"""The version, apart from everything else so that reading it loads nothing."""

__version__ = "0.1.0"
