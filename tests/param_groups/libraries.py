"""Libraries' models, built small and called once; what was read of them stands in libraries.txt.

`python -m tests.param_groups.libraries` writes that file. Its first content was held against rules
that were written by hand for these models, tensor by tensor.
"""

import functools
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

from param_groups import traced
from param_groups.check import judge, stock
from param_groups.model.context import starred
from param_groups.stock.rules import stock as made

# Built as the model beside it, with more keys.
MORE = {
    "hf:mixtral": ("hf:mistral", {"num_local_experts": 4}),
    "hf:t5, gated": ("hf:t5", {"feed_forward_proj": "gated-gelu"}),
    "timm:convnextv2_atto": ("timm:convnext_tiny", {}),
}
MODELS = (*stock.MODELS, "hf:t5, gated", "timm:convnextv2_atto")
TORCHS = ("nn.Transformer", "nn.MultiheadAttention")
KEPT = Path(__file__).with_name("libraries.txt")
_DEPTHS = ("depth", "encoder_layers", "decoder_layers", "num_layers", "num_hidden_layers")


def build(name, width, depth=2):
    """A fresh model with heads of 16."""
    if name == "nn.Transformer":
        return nn.Transformer(width, width // 16, depth, depth, 4 * width)
    if name == "nn.MultiheadAttention":
        return nn.MultiheadAttention(width, width // 16)
    like, more = MORE.get(name, (name, {}))
    sizes = stock.sizes(like, width) | more
    if "depths" in sizes:
        sizes["depths"] = (1, 1, 1, depth)
    sizes |= {key: depth for key in _DEPTHS if key in sizes}
    sizes |= {"num_decoder_layers": depth} if "t5" in name else {}
    return made(name.partition(",")[0], **sizes)


def run(name, model):
    """One pass over inputs that reach every expert."""
    if name in TORCHS:
        size = getattr(model, "d_model", None) or model.embed_dim
        return model(*[torch.randn(5, 2, size) for _ in range(2 if "former" in name else 3)])
    batch = stock.batch_of(name.partition(",")[0], 0)
    if name.startswith("timm"):
        return model(batch["pixel_values"])
    return model(**({"input_ids": torch.arange(64)[None]} if name == "hf:mixtral" else batch))


@functools.cache
def read(name):
    """A trace at widths 64 and 128."""
    of = functools.partial(build, name), functools.partial(run, name)
    return traced(*of, (64, 128), depths=(2, 3))


@functools.cache
def planned(name, rule, width):
    """`stock.planned`, on the meta device but where a LayerScale is read."""
    with torch.device("cpu" if "convnext" in name else "meta"):
        return stock.planned(name, rule, width)


def described(name):
    """What is kept of a model: a line per kind of tensor, its factors and doubts, verdicts."""
    found, kinds = read(name), defaultdict(list)
    for r in found.readings:
        place = "inside" if r.inside and r.role and r.role.facts.branch else "outside"
        start = f"starts at {r.scale:g}" if r.start and not r.keep else r.keep * "kept"
        parts = f"parts {r.parts}" if r.parts is not None else ""
        cells = (r.role or "unread", r.layout, f"{r.fan_in} > {r.fan_out}", place, parts)
        line = " ".join(map(str, filter(None, (*cells, start, r.problem))))
        kinds[line].append(starred(r.name))
    lines = [f"{line}: {' '.join(dict.fromkeys(names))}" for line, names in kinds.items()]
    lines += [f"{what}: {value}" for what, value in found.factors.items()]
    for rule in ("mup", "one_rate") if name in stock.MODELS else ():
        plans = {width: planned(name, rule, width)[1] for width in (64, 128, 256)}
        words = sorted({one.verdict for one in judge(plans)})
        lines.append(f"numbers under {rule}: {', '.join(words)}")
    return "\n".join(lines)


def kept():
    """{model: what stands of it in libraries.txt}."""
    sections = KEPT.read_text(encoding="utf-8").split("\n# ")[1:]
    return {name: text.strip() for name, _, text in (one.partition("\n") for one in sections)}


if __name__ == "__main__":
    intro = "Roles, fans, places, starts, factors and verdicts of libraries' models at width 128"
    text = "\n\n".join(f"# {name}\n{described(name)}" for name in (*MODELS, *TORCHS))
    KEPT.write_text(f"{intro}\n\n{text}\n", encoding="utf-8")
