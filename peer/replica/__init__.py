"""What computes: the model, its inner loop and its device."""
