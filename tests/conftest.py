"""Settings of the whole suite: offline, and one thread per test process."""

import os

# Tests run in parallel processes; more threads than cores would only slow them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# bf16 is tested on processors that can only imitate it, too.
os.environ.setdefault("TRAINING_EMULATE_BF16", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)
