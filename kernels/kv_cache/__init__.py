"""Writing the paged KV cache, and checking its page tags."""
