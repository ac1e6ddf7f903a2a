"""Settings of the whole suite: offline, and one thread per test process."""

import functools
import gc
import ipaddress
import os
import socket
import sys
from pathlib import Path

# Tests run in parallel processes; more threads than cores would only slow them down. It is torch's
# number, too, which is not imported here: the process that only hands out tests does without.
os.environ["OMP_NUM_THREADS"] = "1"
# What is compiled is compiled here: a process for it would import torch once more.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# bf16 is tested on processors that can only imitate it, too.
os.environ.setdefault("TRAINING_EMULATE_BF16", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest

# What a killed process has written stays; only a power cut, which no test makes, needs the disk.
os.fsync = lambda descriptor: None

# No host is found by its name but this machine: nothing is fetched by mistake.
resolve = socket.getaddrinfo


def resolve_here(host, *place, **how):
    name = host.decode() if isinstance(host, bytes) else host
    if name not in (None, "", "localhost", socket.gethostname()):
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            raise socket.gaierror(f"{name}: the tests are offline") from None
    return resolve(host, *place, **how)


socket.getaddrinfo = resolve_here

# Files whose tests start processes, train or draw: `bash scripts/test.sh quick` leaves them out.
SLOW = """
    bart_span_denoise effective_theory measure nanolm_c4 plots vit_cifar5m vit_imagenet
    param_groups/check/test_muon_check.py
    param_groups/check/test_transfer.py
    param_groups/test_depth_and_decay.py param_groups/test_installed.py
    param_groups/test_models.py param_groups/test_libraries.py param_groups/test_tensors.py
    sweeps/test_cost.py sweeps/test_pool.py sweeps/test_ray.py sweeps/test_search.py
    sweeps/test_slurm_scripts.py sweeps/test_study.py sweeps/test_survives.py
    test_costs.py test_download.py test_examples.py test_experiments.py test_integrations.py
    test_fuzz.py test_readme.py test_refused.py
    training/test_damaged.py training/test_divergence.py
    training/test_experiment.py training/test_kills.py training/test_linear_cross_entropy.py
    training/test_loop.py training/test_optimizers.py training/test_resume.py
    training/test_several_processes.py training/test_sharding.py training/test_token_cache.py
""".split()


@pytest.fixture
def no_picture(monkeypatch):
    """A coordinate check without its picture, which takes longer: test_command looks at one."""
    monkeypatch.setitem(sys.modules, "param_groups.check.figure", None)


@functools.cache
def is_slow(path):
    here = Path(__file__).parent
    return any((here / name) in (path, *path.parents) for name in SLOW)


def pytest_ignore_collect(collection_path, config):
    """The quick half imports no file that it leaves out."""
    return True if config.option.markexpr == "not slow" and is_slow(collection_path) else None


def pytest_itemcollected(item):
    """Marks the tests of slow files, before -m chooses."""
    if is_slow(item.path):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # after xdist's own
def pytest_collection_modifyitems(config, items):
    """Keeps the tests of an xdist_group in one process, and begins with these: a long group that
    comes last would leave the other processes idle."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    for item in items:
        group = item.get_closest_marker("xdist_group")
        if group and getattr(config.option, "loadgroup", False):
            name = f"@{group.args[0]}"
            # xdist 3.8 adds the group to `_nodeid`, which pytest 9.2 no longer reads.
            if not item.nodeid.endswith(name):
                item._id = type(item.id).parse(item.nodeid + name)


def pytest_collection_finish():
    """What is imported by now stays: searches for garbage, which took 5 % of the time, pass it."""
    gc.freeze()


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Overrides for a decoder on a folder of little documents and a tokeniser for them."""
    from tests.experiment_cases import write_texts

    root = tmp_path_factory.mktemp("texts")
    write_texts(root)
    words = f"data.source=local data.path={root / 'one'} data.cache_dir={root / 'cache'}"
    return f"{words} data.tokenizer_vocab_size=80 data.validation_fraction=0.2".split()
