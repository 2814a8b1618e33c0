import dataclasses
import inspect

import pytest
import torch
from torch.nn.attention import varlen

from sidestream.training.packing import (
    AttentionCall,
    AttentionChoice,
    PackedSeqParams,
    attention,
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


def test_a_call_on_this_machine():
    call = AttentionCall.on(torch.device("cpu"), dtype=torch.float32, head_dim=64)
    reasons = "varlen: needs a GPU; flex: needs a GPU"
    assert str(choose_attention(call)) == f"documents ({reasons})"


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


@pytest.fixture
def forced(monkeypatch):
    """Makes a way the best one, as it is on a GPU."""

    def force(way):
        monkeypatch.setattr(attention, "choose_attention", lambda _: AttentionChoice(way, ()))

    return force


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
def test_varlen_is_given_what_it_documents(forced, monkeypatch, causal):
    signature = inspect.signature(varlen.varlen_attn)

    def stand_in(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        offsets = given["cu_seq_q"]
        assert offsets.dtype == torch.int32 and given["cu_seq_k"] is offsets
        assert given["max_q"] == given["max_k"] == max(LENGTHS)
        asked = given["window_size"] == (-1, 0)
        assert asked == causal
        qkv = (given[name] for name in ("query", "key", "value"))
        return _by_hand(*qkv, offsets.diff().tolist(), causal=asked)

    stand_in.__signature__ = signature
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    forced("varlen")
    inputs = _inputs()
    mixed = packed_attention(*inputs, PackedSeqParams.from_lengths(LENGTHS), causal=causal)
    assert torch.equal(mixed, _by_hand(*inputs, LENGTHS, causal=causal))


@pytest.mark.slow
def test_varlen_is_compiled_into_one_graph(forced):
    forced("varlen")
    graphs = []

    def compiler(graph, _inputs):
        graphs.append(graph)
        return lambda *_: (torch.zeros(sum(LENGTHS), HEADS, HEAD_DIM),)

    compiled = torch.compile(packed_attention, backend=compiler, fullgraph=True)
    params = PackedSeqParams.from_lengths(LENGTHS)
    with torch.no_grad():
        assert compiled(*_inputs(dtype=torch.bfloat16), params).shape == (27, HEADS, HEAD_DIM)
    (graph,) = graphs
    called = [node for node in graph.graph.nodes if "_varlen_attn" in str(node.target)]
    assert [node.meta["example_value"][0].shape for node in called] == [(27, HEADS, HEAD_DIM)]


# What torch traces of its own for a block mask.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
def test_flex_attention_keeps_documents_apart(forced, causal):
    forced("flex")
    compiled = torch.compile(packed_attention, backend="aot_eager", fullgraph=True)
    inputs = _inputs(dtype=torch.float32).detach()  # its backward needs a GPU
    mixed = compiled(*inputs, PackedSeqParams.from_lengths(LENGTHS), causal=causal)
    expected = _by_hand(*inputs, LENGTHS, causal=causal)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=100 * torch.finfo(torch.float32).eps)
