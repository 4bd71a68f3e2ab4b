"""Paged decode attention: MLA, GQA, and sparse MLA with its indexer."""
