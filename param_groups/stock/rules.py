"""Rules of libraries' models, and small models of theirs by name.

Class, register and latent tokens are position embeddings: vectors of the width that are added to
the stream. Hugging Face's models are meant with tie_word_embeddings=False, which most prescriptions
need.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from param_groups.roles import PlanError, Role, Rule, assign, check_model, present
from param_groups.stock.twins import named, traced_rules

if TYPE_CHECKING:
    from torch import nn


# The factors that peft puts beside a frozen model's matrices: name them along with the model's own
# rules, whose patterns that begin with a module's name need "base_model.model." before it.
LORA_RULES = (Rule("*.lora_A.*", Role.LORA_A), Rule("*.lora_B.*", Role.LORA_B))


def rules_for(model: nn.Module) -> list[Rule]:
    """The rules of a model of Hugging Face's or timm's, traced once per class and options.

    Two small models of the same class are traced: of Hugging Face's with the same config; of timm's
    with the same name, if it has one, and the options that give it the model's tensors. A
    LayerScale starts where its module says, or at the number that fills it: its rule's `scale`.

    Args:
        model: of any size, on any device; it is only read. Of a tied one the embedding's rule names
            both, and `plan` refuses what gives the two other numbers.

    Returns:
        Rules for every tensor of the model, without any that match nothing.

    Raises:
        PlanError: a model of no library's, which `traced` has rules for; one whose class cannot be
            built small, or that has other tensors than its class; a LayerScale on the meta device,
            or after training, whose module does not say where it starts.

    Source: `traced`; verdicts of the check are in stock/models.md.

    >>> from timm.models import VisionTransformer
    >>> model = VisionTransformer(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2)
    >>> inside = [rule for rule in rules_for(model) if rule.pattern.startswith("blocks.*.attn")]
    >>> sorted({str(rule.role) for rule in inside})
    ['attention_output', 'hidden_bias', 'qkv']
    """
    check_model(model)
    rules = present(traced_rules(model), model)
    assign(model, rules)
    scales = Role.LAYER_SCALE
    own = hasattr(model, "config")  # which says where they start
    return [_started(r, model) if r.role is scales and not own else r for r in rules]


def _started(rule: Rule, model: nn.Module) -> Rule:
    """A LayerScale's rule with the value at which the model's own LayerScales start."""
    scales = {name: p for name, p in model.named_parameters() if rule.matches(name)}
    starts = {_start(name, p, model) for name, p in scales.items()}
    if len(starts) == 1 and (start := starts.pop()) is not None:
        return replace(rule, scale=start)
    first = next(iter(scales))
    why = "is on the meta device" if scales[first].is_meta else "and its likes hold several numbers"
    raise PlanError(
        f"where the LayerScales of {type(model).__name__} start cannot be read: {first!r} {why}. "
        "Take the rules of an untrained model of any size off the meta device, whose LayerScale "
        "rules have its start as `scale`"
    )


def _start(name: str, scale: nn.Parameter, model: nn.Module) -> float | None:
    """The number with which a module says its LayerScale starts, or which fills it; else None."""
    initial = getattr(model.get_submodule(name.rpartition(".")[0]), "init_values", None)
    if isinstance(initial, float):
        return initial
    if scale.is_meta:
        return None
    values = (scale.full_tensor() if hasattr(scale, "full_tensor") else scale).detach().unique()
    # Seven digits: 1e-6 as float32 has it is 1e-6 again.
    return float(f"{values.item():.7g}") if len(values) == 1 else None


def stock(name: str, **sizes: object) -> nn.Module:
    """A stock model from its config, untied, with values of its own; nothing is downloaded.

    "hf:gpt2" is the model type of a Hugging Face config, whose keys `sizes` sets; "timm:vit_tiny_
    patch16_224" a name of timm's, with arguments of `timm.create_model`. Under
    `torch.device("meta")` it takes no memory. Raises PlanError for an unknown name or key.
    """
    library, _, kind = name.partition(":")
    build = {"hf": _hugging_face, "timm": named}.get(library)
    if build is None or not kind:
        raise PlanError(f"unknown model {name!r}; write hf:gpt2 or timm:vit_tiny_patch16_224")
    try:
        return build(kind, sizes)
    except ImportError as error:
        raise PlanError(f"{name}: {error.name} is not installed") from None
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PlanError(f"{name}: cannot build it from its config: {reason[:150]}") from None


def _hugging_face(kind: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{"tie_word_embeddings": False, **sizes})
    # T5's config answers with True to whatever it was given.
    config.tie_word_embeddings = sizes.get("tie_word_embeddings", False)
    for task in ("Seq2SeqLM", "SpeechSeq2Seq", "MaskedLM", "CausalLM", "ImageClassification"):
        try:
            auto = getattr(transformers, f"AutoModelFor{task}")
            model: nn.Module = auto.from_config(config)
            return model
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
    raise ValueError("is neither a language model nor an image or speech model")
