"""What the ranks of a tensor-parallel group say to one another."""
