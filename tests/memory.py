"""What a step takes."""

import gc
import itertools

import torch


def most_allocated(function):
    """The largest sum of what a call allocates and has not yet freed."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    records = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in records))


def most_alive(model, optimizer, step):
    """The largest sum of live tensors in a second step."""
    gc.freeze()  # what is there already need not be looked through
    try:
        step()
        gc.collect()
    finally:
        gc.unfreeze()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    live = sum(tensor.untyped_storage().nbytes() for tensor in [*model.parameters(), *state])
    return live + most_allocated(step)
