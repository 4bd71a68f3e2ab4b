"""Signing, verifying and loading releases. Nothing here imports torch or numpy at start-up."""
