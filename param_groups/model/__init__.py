"""What a plan does to a torch model: looks at it, fills it, trains its matrices."""
