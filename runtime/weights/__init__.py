"""From verified tensors to the blocks of a model."""
