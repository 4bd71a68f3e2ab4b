"""The reference runtime: verified weights, paged KV, tagged pages, two stages, eight ranks."""
