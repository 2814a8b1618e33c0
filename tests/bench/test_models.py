"""Tests of the benches' decoder: nine tensors a block, its size, repeatable weights and batches."""

import pytest
import torch

from sidestream.bench.models import (
    STEP_TIME_CONFIG,
    TENSORS_A_BLOCK,
    DecoderConfig,
    build_batch,
    build_decoder,
    host_cost_config,
)

SMALL = DecoderConfig(layers=2, width=16, heads=2, hidden=32, vocabulary=32, sequence=8, batch=2)


@pytest.mark.parametrize(
    "config", [host_cost_config(50), STEP_TIME_CONFIG], ids=["host-cost", "step-time"]
)
def test_size_is_as_the_config_says(config):
    with torch.device("meta"):
        model = build_decoder(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.numel
    assert len(list(model.parameters())) == config.layers * TENSORS_A_BLOCK + 3


def test_every_parameter_gets_a_gradient_and_the_loss_starts_near_chance():
    model = build_decoder(SMALL)
    loss = model(*build_batch(SMALL, seed=1))
    loss.backward()
    assert loss.shape == ()
    assert abs(loss.item() - torch.tensor(float(SMALL.vocabulary)).log().item()) < 0.5
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_a_token_sees_no_later_token():
    model = build_decoder(SMALL)
    hidden = torch.randn(1, SMALL.sequence, SMALL.width)
    changed = hidden.clone()
    changed[:, 5] += 1.0
    difference = (model.blocks[0](hidden) - model.blocks[0](changed)).abs().sum(-1)[0]
    assert torch.equal(difference[:5], torch.zeros(5))
    assert bool((difference[5:] > 0).all())


def test_weights_follow_the_seed_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    first, same, other = (build_decoder(SMALL, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_targets_are_the_tokens_one_position_on():
    tokens, targets = build_batch(SMALL, seed=3)
    assert tokens.shape == targets.shape == (SMALL.batch, SMALL.sequence)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, build_batch(SMALL, seed=3)[0])
    assert not torch.equal(tokens, build_batch(SMALL, seed=4)[0])
    assert int(tokens.min()) >= 0
    assert int(targets.max()) < SMALL.vocabulary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"layers": 0}, "at least 1", id="no-layers"),
        pytest.param({"heads": 3}, "multiple of heads, got width 16 and heads 3", id="odd-heads"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    sizes = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**sizes, **change})
