import pytest
import torch

from sidestream.training.model import MODEL_SIZES, GPTConfig, build_model, model_config

TINY = GPTConfig(num_layers=2, width=32, num_heads=4, context=8)


def test_logits_have_one_value_a_byte():
    logits = build_model(TINY, seed=0)(torch.zeros(3, 8, dtype=torch.int64))
    assert logits.shape == (3, 8, 256)
    assert torch.isfinite(logits).all()


def test_a_position_sees_no_later_byte():
    model = build_model(TINY, seed=0)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_values_follow_from_the_seed_alone():
    first = build_model(TINY, seed=1)
    torch.manual_seed(1234)
    second = build_model(TINY, seed=1)
    other = build_model(TINY, seed=2)
    for (name, value), (_, same) in zip(
        first.named_parameters(), second.named_parameters(), strict=True
    ):
        assert torch.equal(value, same), name
        assert torch.isfinite(value).all(), name
    assert not torch.equal(first.head.weight, other.head.weight)


def test_untrained_loss_is_that_of_a_uniform_guess():
    tokens = torch.randint(256, (4, 9))
    logits = build_model(TINY, seed=0)(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1))
    # ln 256 = 5.545; logits of standard deviation s raise it by about s * s / 2, here below 0.1.
    assert loss.item() == pytest.approx(5.545, abs=0.1)


def test_dropout_only_while_training():
    config = GPTConfig(num_layers=1, width=32, num_heads=4, context=8, dropout=0.5)
    model = build_model(config, seed=0)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_named_sizes_take_the_context(size):
    assert model_config(size, context=77).context == 77


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_layers": 0}, "num_layers >= 1, got 0"),
        ({"width": 33}, "width 33 and 4 heads"),
        ({"dropout": 1.0}, "dropout < 1, got 1.0"),
    ],
    ids=["no_layers", "width", "dropout"],
)
def test_impossible_sizes_are_refused(change, expected):
    with pytest.raises(ValueError, match=expected):
        GPTConfig(**{"num_layers": 1, "width": 32, "num_heads": 4, **change})


def test_unknown_size_and_long_sequence_are_refused():
    with pytest.raises(ValueError, match=r"among tiny, small.* got 'huge'"):
        model_config("huge", context=8)
    with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
        build_model(TINY, seed=0)(torch.zeros(1, 9, dtype=torch.int64))
