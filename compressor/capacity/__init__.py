"""Planning capacity: what of a GPU the weights take, and how many tokens fit in the rest."""
