"""What a GPU would be told to do, counted on a CPU: kernels and their bytes, launches, reads."""

import math
import re
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i64": 8, "i32": 4, "i1": 1, "u8": 1}


class _Written(Exception):
    """The code is there; nothing need be built or run."""


def triton_kernels(function, *args, monkeypatch):
    """The sources of the Triton kernels that inductor makes of a function of these tensors."""
    from torch._inductor import config  # takes as long to import as torch
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.graph import GraphLowering

    codes = []

    def write(graph):
        codes.append(graph.codegen()[0].value)
        raise _Written

    torch._dynamo.reset()
    monkeypatch.setattr(torch.utils._triton, "triton_hash_with_backend", lambda: "none")
    # Asks whether the device is a GPU, as only its kernels have the one-pass softmax.
    check = post_grad.prepare_softmax_extra_check
    monkeypatch.setattr(check, "__code__", (lambda match: True).__code__)
    on_gpu = config.patch(cpu_backend="triton", force_disable_caches=True)
    written = pytest.raises(torch._dynamo.exc.TorchDynamoException, match="_Written")
    with written, on_gpu, mock.patch.object(GraphLowering, "compile_to_module", write):
        torch.compile(function, dynamic=False, fullgraph=True)(*args)
    torch._dynamo.reset()
    [code] = codes
    return re.findall(r"@triton\.jit\n(def .*?)\n'''", code, re.S), code


def bytes_per_entry(code, entries):
    """Bytes that the kernels of a code read and write for every one of a tensor's entries.

    What is read once per row or column, or once at all, is not counted.
    """
    total = 0
    kernel = r"'signature': (\{.*?\}).*?@triton\.jit\n(def .*?)\n'''"
    for signature, source in re.findall(kernel, code, re.S):
        types = dict(re.findall(r"'(\w+)': '\*(\w+)'", signature))
        rows, *inner = (int(n) for n in re.findall(r"^ +(?:x|r0_)numel = (\d+)$", source, re.M))
        if rows * math.prod(inner) < entries:
            continue
        # The variables that run over all entries, and not over a part of them again and again.
        whole = re.findall(rf"^ +(\w+) = {'r0_index' if inner else 'xindex'}$", source, re.M)
        for name, index in re.findall(r"tl\.(?:load|store)\((\w+) \+ \((.*?)\),? ", source):
            each = set(re.findall(r"\w+", index)) & set(whole)
            if each and (not inner or rows == 1 or re.search(r"\bx\d", index)):
                total += SIZES[types[name]]
    return total


class Counted(TorchDispatchMode):
    """Notes launches, copies between devices that block, and reads of a device's numbers.

    "meta" is the GPU. A view launches nothing.
    """

    def __init__(self):
        super().__init__()
        self.launches, self.waits = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_gpu = any(x.device.type == "meta" for x in tensors)
        if function is torch.ops.aten._local_scalar_dense.default and on_gpu:
            self.waits.append(str(function))
            return 1.0
        if function is torch.ops.aten._fused_sgd_.default:  # has no kernel for meta
            self.launches.append(str(function))
            return None
        if function is torch.ops.aten.addmm.dtype_out:  # nor, but a wrong one, in torch 2.11
            self.launches.append(str(function))
            total, left, right, dtype = args
            assert (len(left), right.shape[1]) == total.shape == kwargs["out"].shape
            assert left.shape[1] == len(right) and total.dtype == kwargs["out"].dtype == dtype
            return kwargs["out"]
        result = function(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in (*tensors, *made) if x.ndim or not function.is_view}
        copies = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if copies and devices == {"meta", "cpu"}:
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                self.waits.append(str(function))
        elif on_gpu and not function.is_view and not re.search("view|empty", str(function)):
            self.launches.append(str(function))
        return result
