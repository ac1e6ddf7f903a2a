"""Stock fairseq computes the same function; weights go there and back; importing it is quiet."""

import os
import sys

import pytest
import torch
import torch.nn.functional as F

from bart_span_denoise import fairseq_interop
from bart_span_denoise.model import PADDING, Bart
from tests.processes import finished
from training.errors import UserError
from training.linear_cross_entropy import IGNORE

WIDTH, VOCABULARY, ROWS = 32, 40, 14

pytestmark = [
    pytest.mark.xdist_group("fairseq"),  # importing it takes seconds: one process has all
    # Its attention calls torch with masks of two types.
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
]


def small(seed=0, **changes):
    """A little float32 model whose every weight matters."""
    shape = {"vocab_size": VOCABULARY, "width": WIDTH, "heads": 4, "layers": 2, "dropout": 0.1}
    shape |= {"position_rows": ROWS, "attention_scale": 8**-0.5, "logit_multiplier": 0.3}
    model = Bart(**{**shape, **changes}).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.zero_padding()
    return model


def stock(model):
    """fairseq's model with our weights, out of training mode."""
    theirs = fairseq_interop.build(model).eval()
    theirs.load_state_dict(fairseq_interop.to_fairseq(model), strict=True)
    return theirs


def batch():
    generator = torch.Generator().manual_seed(5)
    encoder, decoder, targets = (
        torch.randint(4, VOCABULARY, (3, length), generator=generator) for length in (11, 9, 9)
    )
    for row, (source, target) in enumerate([(6, 9), (11, 5), (9, 7)]):
        encoder[row, source:] = PADDING
        decoder[row, target:] = PADDING
        targets[row, target:] = IGNORE
    return encoder, decoder, targets


def close(got, wanted):
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def tensors(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(model, expected):
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("positions", ["paper", "fairseq"])
@pytest.mark.parametrize("rescale", [1.0, 0.3])
def test_logits_and_gradients_are_those_of_stock_fairseq(positions, rescale):
    ours = small(positions=positions, logit_multiplier=rescale)
    theirs, (encoder, decoder, targets) = stock(ours), batch()
    logits = theirs(encoder, None, decoder)[0]
    close(ours(encoder, decoder)[decoder != PADDING], logits[decoder != PADDING])
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    mine = ours(encoder, decoder, targets)
    mine.backward()
    close(mine, loss)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, other in fairseq_interop._matrices(ours):
        close(ours.get_parameter(name).grad, gradients[other])
    for name, other in fairseq_interop._POSITIONS.items():
        close(ours.get_parameter(name).grad, gradients[other][-ROWS:])
    words = gradients["encoder.embed_tokens.weight"]
    assert (words[PADDING] != 0).any()  # by the output, where ours has none
    words[PADDING] = 0
    close(ours.word_embedding.weight.grad, words)


@pytest.mark.parametrize("positions", ["paper", "fairseq"])
def test_weights_go_to_fairseq_and_come_back_unchanged(positions, tmp_path):
    fairseq = fairseq_interop.fairseq()
    model = small(positions=positions)
    fairseq_interop.save(model, tmp_path / "model.pt")
    with pytest.raises(UserError, match="/dev/full: cannot write"):
        fairseq_interop.save(model, "/dev/full")
    checkpoint = fairseq.checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "model.pt"))
    theirs = fairseq_interop.build(model).eval()
    theirs.load_state_dict(checkpoint["model"], strict=True)
    encoder, decoder, _ = batch()
    got, wanted = theirs(encoder, None, decoder)[0], model(encoder, decoder)
    close(got[decoder != PADDING], wanted[decoder != PADDING])

    again = small(seed=1, positions=positions)
    fairseq_interop.from_fairseq(theirs.state_dict(), again)
    assert_same(again, tensors(model))
    read = small(seed=2, positions=positions)
    fairseq_interop.load(tmp_path / "model.pt", read)
    assert_same(read, tensors(model))


def test_a_state_without_biases_and_norms_or_in_half_precision_is_read(tmp_path):
    model, again = small(logit_multiplier=1.0), small(seed=1, logit_multiplier=1.0)
    state = fairseq_interop.to_fairseq(model)
    bare = {
        name: value
        for name, value in state.items()
        if "norm" not in name and not name.endswith((".bias", ".version"))
    }
    assert len(bare) < len(state) / 2
    torch.save(bare, tmp_path / "bare.pt")
    fairseq_interop.load(tmp_path / "bare.pt", again)
    assert_same(again, tensors(model))
    words = state["encoder.embed_tokens.weight"]  # three names share it
    words[PADDING] = 0.5  # as fairseq trains it
    half = {name: value.bfloat16() for name, value in state.items()}
    fairseq_interop.from_fairseq(half, again)
    assert (again.word_embedding.weight[PADDING] == 0.5).all()
    assert torch.equal(again.encoder_positions.weight, model.encoder_positions.weight.bfloat16())


BIAS, SCALE = "decoder.layers.1.encoder_attn.k_proj.bias", "encoder.layernorm_embedding.weight"
OUTPUT, WORDS = "decoder.layer_norm.weight", "decoder.output_projection.weight"
FC1, POSITIONS = "encoder.layers.0.fc1.weight", "encoder.embed_positions.weight"
WRONG = {
    "a bias": (BIAS, lambda v: v + 0.1, f"'{BIAS}' is not 0 throughout.*neither biases"),
    "a scale": (SCALE, lambda v: v * 2, f"'{SCALE}' is not 1 throughout"),
    "a shift": ("decoder.layer_norm.bias", lambda v: v + 1, "'decoder.layer_norm.bias' is not 0"),
    "another N_rescale": (OUTPUT, lambda v: v * 2, f"'{OUTPUT}' is not 0.3 throughout"),
    "no N_rescale": (OUTPUT, None, f"no '{OUTPUT}'; expected one of shape"),
    "an untied output": (WORDS, lambda v: v + 1, f"'{WORDS}' is not 'encoder.embed_tokens.weight'"),
    "another shape": (FC1, lambda v: v[1:], rf"'{FC1}' has shape \(127, 32\); expected \(128, "),
    "no matrix": (FC1, None, rf"has no '{FC1}'; expected one of shape \(128, 32\)"),
    "fewer positions": (POSITIONS, lambda v: v[2:], rf"'{POSITIONS}' has shape \(14, 32\)"),
    "no positions": (POSITIONS, None, f"has no '{POSITIONS}'"),
    "a deeper model": ("encoder.layers.2.fc1.weight", lambda v: torch.ones(1), "'encoder.layers.2"),
    "a bias of another size": (BIAS, lambda v: v[1:], rf"'{BIAS}' has shape \(31,\)"),
}


@pytest.mark.parametrize(("name", "change", "message"), WRONG.values(), ids=WRONG)
def test_what_the_model_cannot_hold_is_named_and_changes_nothing(name, change, message):
    state, model = fairseq_interop.to_fairseq(small(seed=1)), small()
    before = tensors(model)
    value = state.pop(name, None)
    if change is not None:
        state[name] = change(value)
    with pytest.raises(UserError, match=message):
        fairseq_interop.from_fairseq(state, model)
    assert_same(model, before)


STATE = """
import logging, multiprocessing, os, random, sys
import numpy, torch
from bart_span_denoise import fairseq_interop
assert "fairseq" not in sys.modules
def state():
    root = logging.getLogger()
    return (root.level, list(root.handlers), root.manager.disable,
            multiprocessing.get_start_method(allow_none=True),
            random.getstate(), numpy.random.get_state()[1].tolist(), os.getcwd(),
            torch.get_rng_state().tolist(), torch.get_num_threads())
before = state()
fairseq_interop.fairseq()
assert "fairseq" in sys.modules
for a, b in zip(before, state()):
    assert a == b, (a, b)
"""


def test_importing_fairseq_leaves_the_process_as_it_was(tmp_path):
    script = tmp_path / "state.py"
    script.write_text(STATE)
    done = finished(script, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    assert (done.returncode, done.out) == (0, ""), done.err
    assert "fairseq" not in done.err and "INFO" not in done.err
