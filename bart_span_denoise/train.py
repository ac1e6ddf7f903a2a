"""Train one BART: `python -m bart_span_denoise.train bart_span_denoise/configs/laptop.yaml`.

Also `accelerate launch -m bart_span_denoise.train ...`.
"""

from __future__ import annotations

import math
from typing import Any

from bart_span_denoise import cost
from bart_span_denoise.config import Config
from training.errors import UserError
from training.experiment import Experiment


def prescription(config: Config):
    """The config's strategy at the model's width (Dinan et al., Part II, section 2)."""
    from bart_span_denoise.ablations import Ablated
    from param_groups import Dinan

    fields = config.prescription.model_dump()
    kind = Ablated if {"c_we", "rescale"} & fields.keys() else Dinan
    return kind(width=config.model.width, optimizer=config.optimizer.name, init="bart", **fields)


def build_model(config: Config, vocab_size: int):
    """The encoder-decoder, allocated but not initialised: the plan does that."""
    from bart_span_denoise.model import Bart

    shape = config.model
    return Bart(
        vocab_size=vocab_size,
        width=shape.width,
        heads=shape.width // shape.head_dim,
        layers=shape.layers,
        mlp_ratio=shape.mlp_ratio,
        position_rows=config.data.tokens_per_sample + 2,
        positions=shape.positions,
        dropout=shape.dropout,
        attention_dropout=shape.attention_dropout,
    )


def build_plan(config: Config, model):
    """Every tensor's numbers; the model may be on the meta device."""
    from bart_span_denoise.model import RULES
    from param_groups import plan

    return plan(model, RULES, prescription(config), **config.optimizer.numbers)


def build_blank(config: Config, rows: int):
    """A model without values, its loss, and a batch of full samples without content: no data."""
    import torch

    ids = torch.empty(rows, cost.tokens(config), dtype=torch.int64)
    return build_model(config, cost.vocabulary(config)), loss, (ids, ids, ids)


def loss(model, batch):
    """The summed loss in nats."""
    return model(*batch)


def vocab_size(config: Config, own: int) -> int:
    """Rows of the word embedding: the config's, which must hold the dictionary's, or as many."""
    wanted = config.model.vocab_size or own
    if wanted < own:
        raise UserError(
            f"model.vocab_size {wanted} is smaller than the dictionary's {own} symbols; raise it "
            "or leave it out"
        )
    return wanted


def open_corpus(config: Config):
    """The config's samples; the first process makes the cache that the others open."""
    from bart_span_denoise import data
    from training import processes

    with processes.state().main_process_first():
        return data.from_config(config)


def build_task(config: Config):
    """Model, plan, data and loss of a config, for the loop and for the coordinate check."""
    import functools

    from bart_span_denoise import data
    from measure.probes import ProbeRecorder
    from training import sharding
    from training.task import Task

    corpus = open_corpus(config)
    with sharding.building():
        model = build_model(config, vocab_size(config, corpus.vocab_size))
    longest = model.longest if config.training.compile else 1
    return Task(
        config=config,
        model=model,
        plan=build_plan(config, model),
        train_data=corpus.train,
        eval_data=corpus.validation,
        loss=loss,
        count=data.count,
        # Padded to the longest row, all batches have one shape: torch.compile compiles once.
        collate=functools.partial(data.collate, multiple=longest),
        forward=lambda model, batch: model(*batch[:2]),
        measure=measure,
        eval_collate=functools.partial(data.collate_evaluation, multiple=longest),
        by_epoch=True,
        after_init=lambda model: model.zero_padding(),
        recorders=[ProbeRecorder()],
        data_checksum=corpus.cache.checksum,
    )


def measure(model, batch):
    """Sums over targets: the loss in nats, and in bits as fairseq logs it; the share of the loss
    that belongs to targets behind a mask (the others can be copied); how many these are."""
    sources, decoder_ids, targets, hidden = batch
    nats = model(sources, decoder_ids, targets)
    return {
        "loss": nats,
        "bits": nats / math.log(2),
        "infilling": model(sources, decoder_ids, hidden),
        "infilled_tokens": (hidden >= 0).sum(),
    }


def arithmetic(task) -> list[str]:
    """How the run's numbers come about: samples, noise, epochs, clip and decay."""
    config, samples = task.config, len(task.train_data)
    settings, optimizer, noise = config.training, config.optimizer, config.data.noise
    per_epoch = max(1, samples // settings.batch_size)
    return [
        task.train_data.describe(),
        task.eval_data.describe(),
        f"noise {noise.fraction:g} of {noise.unit}s, {noise.fraction_mode}, spans Poisson("
        f"{noise.poisson_lambda:g}), sentences {'permuted' if noise.permute else 'in order'}",
        f"length {settings.steps:,} steps = {settings.steps / per_epoch:g} epochs",
        f"clip {optimizer.clip_norm} of the mean gradient per target token; decay per step at the "
        f"peak: lr wd = {optimizer.lr * optimizer.weight_decay:g} ({optimizer.decay_mode})",
    ]


def result(summary: dict[str, Any]) -> str:
    """A finished run's outcome."""
    if summary["best_eval_loss"] is None:
        return "no evaluation"
    nats, bits = summary["best_eval_loss"], summary["best_eval_bits"]
    return f"lowest eval loss {nats:.4f} nats = {bits:.4f} bits per token"


EXPERIMENT = Experiment.of(
    globals(),
    cost,
    reads=("data.path", "data.bpe_encoder", "data.bpe_vocab", "data.bpe_dictionary"),
)

if __name__ == "__main__":
    EXPERIMENT.main()
