"""Quality of a release against the checkpoint it came from."""
