"""Reading a torch model: what its tensors are for, what a plan does to it."""
