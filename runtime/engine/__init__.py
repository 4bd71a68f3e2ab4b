"""Requests, scheduler, sampling and the loop that joins them to a model."""
