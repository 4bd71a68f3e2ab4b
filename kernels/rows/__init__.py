"""What one layer does to a step's rows besides products and attention: norms, rotary embedding, activations."""
