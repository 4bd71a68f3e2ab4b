"""Prefill and decode as two engines: KV pages handed from one to the other."""
