"""Reading a torch model: what its tensors are for, filling them, training its matrices."""
