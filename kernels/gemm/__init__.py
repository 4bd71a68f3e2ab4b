"""Products of BF16 activations with INT4 weights."""
