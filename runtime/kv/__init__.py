"""The KV cache: pools, pages, who holds them, and which prefix they keep."""
