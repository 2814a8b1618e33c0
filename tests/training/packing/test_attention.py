import dataclasses

import pytest
import torch

from sidestream.training.packing import (
    AttentionCall,
    PackedSeqParams,
    choose_attention,
    packed_attention,
)

LENGTHS = [5, 5, 1, 0, 7, 3, 3, 3]
HEADS, HEAD_DIM = 2, 16
CALL = AttentionCall(
    dtype=torch.bfloat16,
    head_dim=64,
    dropout_p=0.0,
    capability=(9, 0),
    has_varlen=True,
    lengths_known=True,
    compiling=False,
)


def _inputs(lengths=LENGTHS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shape = (3, sum(lengths), HEADS, HEAD_DIM)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def _by_hand(query, key, value, lengths, *, causal):
    """The definition, document by document."""
    parts = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        scores = torch.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5
        if causal:
            future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        parts.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v))
    return torch.cat(parts)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
@pytest.mark.parametrize("way", [None, "documents", "mask"], ids=str)
def test_attention_and_its_gradients_are_those_of_the_definition(way, causal):
    inputs = _inputs()
    mixed = packed_attention(*inputs, PackedSeqParams.from_lengths(LENGTHS), causal=causal, way=way)
    expected = _by_hand(*inputs, LENGTHS, causal=causal)
    # Sums of at most 7 or 16 terms of order 1.
    tolerance = {"rtol": 0, "atol": 100 * torch.finfo(torch.float64).eps}
    torch.testing.assert_close(mixed, expected, **tolerance)
    weights = torch.randn(mixed.shape, dtype=mixed.dtype)
    grads = [torch.autograd.grad(out, inputs, weights)[0] for out in (mixed, expected)]
    torch.testing.assert_close(*grads, **tolerance)


@pytest.mark.parametrize(
    ("way", "value"),
    # A mask multiplies what it hides by zero, which NaN outlives.
    [("documents", torch.nan), ("mask", 99.0)],
    ids=["documents", "mask"],
)
def test_nothing_crosses_a_border(way, value):
    inputs, params = _inputs(), PackedSeqParams.from_lengths(LENGTHS)
    before = packed_attention(*inputs, params, way=way)
    changed = inputs.detach().clone()
    changed[:, 11:18] = value
    after = packed_attention(*changed, params, way=way)
    assert torch.equal(before[:11], after[:11])
    assert torch.equal(before[18:], after[18:])
    assert not torch.equal(before[11:18], after[11:18])
    (grad,) = torch.autograd.grad(before[11:18].sum(), inputs)
    assert not grad[:, :11].any()
    assert not grad[:, 18:].any()
    assert grad[:, 11:18].any()


@pytest.mark.parametrize("lengths", [[], [0], [1]], ids=str)
def test_hardly_any_tokens(lengths):
    inputs = _inputs(lengths)
    mixed = packed_attention(*inputs, PackedSeqParams.from_lengths(lengths))
    mixed.sum().backward()
    assert torch.equal(mixed, inputs[2])


def test_dropout_drops():
    inputs = _inputs()
    params = PackedSeqParams.from_lengths(LENGTHS)
    kept = packed_attention(*inputs, params)
    assert not torch.equal(packed_attention(*inputs, params, dropout_p=0.5), kept)
    # A document of one token attends to itself with weight 1, or 2 where it was not dropped.
    once = packed_attention(*inputs, params, dropout_p=0.5)[10] / inputs[2, 10]
    assert set(once.round(decimals=6).flatten().tolist()) <= {0.0, 2.0}


@pytest.mark.parametrize(
    ("change", "way"),
    [
        ({}, "varlen"),
        ({"dtype": torch.float32}, "flex"),
        ({"capability": (7, 5)}, "flex"),
        ({"has_varlen": False}, "flex"),
        ({"head_dim": 320}, "flex"),
        ({"head_dim": 36}, "flex"),
        ({"dtype": torch.float64}, "documents"),
        ({"head_dim": 12}, "documents"),
        ({"dropout_p": 0.1}, "documents"),
        ({"capability": None}, "documents"),
        ({"capability": None, "compiling": True}, "mask"),
        ({"dropout_p": 0.1, "lengths_known": False}, "mask"),
        ({"compiling": True}, "varlen"),
    ],
    ids=str,
)
def test_the_first_way_that_a_call_can_go(change, way):
    choice = choose_attention(dataclasses.replace(CALL, **change))
    assert choice.way == way
    assert [passed for passed, _ in choice.passed_over] == ["varlen", "flex", "documents", "mask"][
        : len(choice.passed_over)
    ]


def test_a_choice_says_why():
    choice = choose_attention(dataclasses.replace(CALL, dropout_p=0.1))
    assert str(choice) == "documents (varlen: has no dropout; flex: has no dropout)"
    assert str(choose_attention(CALL)) == "varlen"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"params": PackedSeqParams.from_lengths([26])}, "26 tokens, as the params say, got 27"),
        ({"params": PackedSeqParams.from_lengths(LENGTHS).to("meta")}, "params on cpu, got meta"),
        ({"key": torch.zeros(27, 1, 16)}, r"one shape .* got \[27, 2, 16\], \[27, 1, 16\]"),
        ({"dropout_p": 1.0}, "dropout_p < 1, got 1.0"),
        ({"way": "ring"}, "among varlen, flex, documents, mask, got 'ring'"),
        ({"way": "varlen"}, "attention by varlen can do, got .*: needs a GPU"),
    ],
    ids=["total", "device", "shape", "dropout", "unknown_way", "impossible_way"],
)
def test_calls_that_do_not_fit_are_refused(change, expected):
    query, key, value = _inputs(dtype=torch.float32)
    given = {"query": query, "key": key, "value": value}
    given["params"] = PackedSeqParams.from_lengths(LENGTHS)
    with pytest.raises(ValueError, match=expected):
        packed_attention(**given | change)
