"""Records of inputs, and making their tensors from a problem."""
