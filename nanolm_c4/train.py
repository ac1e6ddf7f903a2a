"""Train one decoder: `python -m nanolm_c4.train nanolm_c4/configs/laptop.yaml [key=value ...]`.

Also `accelerate launch -m nanolm_c4.train ...`.
"""

from __future__ import annotations

from typing import Any

from nanolm_c4 import cost
from nanolm_c4.config import BORDELON, Config
from training.errors import UserError
from training.experiment import Experiment


def build_model(config: Config, vocab_size: int):
    """The decoder, allocated but not initialised: the plan does that."""
    from nanolm_c4.model import Decoder

    shape = config.model
    bordelon = config.prescription.parameterization == BORDELON
    return Decoder(
        vocab_size=vocab_size,
        context=shape.context,
        layers=shape.layers,
        heads=shape.heads,
        head_dim=shape.head_dim,
        mlp_ratio=shape.mlp_ratio,
        norm_scale=not bordelon,
        readout_bias=bordelon,
        norms=shape.norms,
        tied=shape.tied,
    )


def rules(config: Config):
    """The role of every tensor that the config's model has."""
    from nanolm_c4.model import DEEP_RULES, RULES
    from param_groups import Role, Rule

    known = DEEP_RULES if config.prescription.outside else RULES
    if config.model.tied:  # named once, as the embedding
        known = [rule for rule in known if rule.role is not Role.READOUT]
    no_scales = [rule for rule in known if "norm" not in rule.pattern]
    if not config.model.norms:
        return no_scales
    if config.prescription.parameterization == BORDELON:
        return (*no_scales, Rule("readout.bias", Role.READOUT_BIAS))
    return known


def build_plan(config: Config, model):
    """Every tensor's numbers; the model may be on the meta device."""
    from param_groups import Tied, plan

    shape, optimizer = config.model, config.optimizer
    prescription, keys = config.prescription.at(shape, optimizer.name), optimizer.numbers
    if shape.tied:  # two places want two multipliers: absorbed, which changes no step
        prescription, keys = Tied(prescription), {**keys, "absorb_multipliers": True}
    return plan(model, rules(config), prescription, **keys)


def build_blank(config: Config, rows: int):
    """A model without values, its loss, and a batch of full samples without content: no data."""
    import torch

    ids = torch.empty(rows, config.model.context, dtype=torch.int64)
    return build_model(config, cost.vocabulary(config)), loss, (ids, ids)


def loss(model, batch):
    """The summed loss in nats."""
    return model(*batch)


def vocab_size(config: Config, corpus) -> int:
    """Rows of the embedding: by default the tokeniser's size, which is also the least allowed."""
    wanted = config.model.vocab_size or corpus.vocab_size
    if wanted < corpus.vocab_size:
        raise UserError(
            f"model.vocab_size {wanted} is smaller than the tokeniser's {corpus.vocab_size} ids; "
            "raise it or leave it out"
        )
    return wanted


def build_task(config: Config):
    """Model, plan, data and loss of a config, for the loop and for the coordinate check."""

    from measure.observations import ObservationRecorder
    from measure.probes import ProbeRecorder
    from nanolm_c4 import data
    from training import processes, sharding
    from training.linear_cross_entropy import IGNORE
    from training.task import Task

    with processes.state().main_process_first():
        corpus = data.from_config(config.data)
    with sharding.building():
        model = build_model(config, vocab_size(config, corpus))
    context = config.model.context
    return Task(
        config=config,
        model=model,
        plan=build_plan(config, model),
        train_data=data.PackedRows(corpus, context, "train"),
        eval_data=data.ValidationRows(corpus, context, config.data.evaluation == "split"),
        # As in training; there may be no full row.
        observe_data=data.PackedRows(corpus, context, "validation"),
        loss=loss,
        count=lambda batch: (batch[1] != IGNORE).sum(),
        collate=data.collate,
        forward=lambda model, batch: model(batch[0]),
        recorders=[ProbeRecorder(), ObservationRecorder()],
        data_checksum=corpus.checksum,
    )


def arithmetic(task) -> list[str]:
    """How often the run sees its text. UserError if the files of C4 hold fewer tokens than the run
    and data.max_train_tokens ask for: the run would repeat text that it should see once."""
    config, rows = task.config, len(task.train_data)
    data, steps = config.data, config.training.steps
    tokens, seen = rows * config.model.context, steps * cost.tokens_per_step(config)
    # A last partial row may be missing; without a limit any amount of text will do.
    wanted = min(seen, data.max_train_tokens or 0)
    if data.source == "c4" and tokens + config.model.context <= wanted:
        raise UserError(
            f"data.source: c4 has {tokens:,} training tokens, and {steps:,} steps see "
            f"{seen:,}; fetch more files with bash scripts/download.sh c4 --shards N, lower "
            f"training.steps, or, to see text again, set data.max_train_tokens={tokens}"
        )
    return [
        f"length {steps:,} steps = {seen / tokens:.3g} epochs of {rows:,} rows of "
        f"{config.model.context} tokens"
    ]


def result(summary: dict[str, Any]) -> str:
    """A run's outcome; one that was stopped, or diverged, has no final evaluation."""
    loss = summary["final_eval_loss"]
    return "no final evaluation" if loss is None else f"final eval loss {loss}"


EXPERIMENT = Experiment.of(
    globals(),
    cost,
    reads=("data.path", "data.tokenizer"),
    embedding=("token_embedding",),  # as Everett et al., Table 3, which counts positions apart
)

if __name__ == "__main__":
    EXPERIMENT.main()
