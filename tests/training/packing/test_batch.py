import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.training.packing import IGNORED_TARGET, pack, pack_batch

NONE = IGNORED_TARGET


def _sequences(lengths):
    """Counted through, so that every token is another."""
    return list(torch.arange(1, sum(lengths) + 1).split(lengths)) if lengths else []


def _packed(lengths, budget, **options):
    return pack_batch(_sequences(lengths), pack(lengths, budget), **options)


def test_places_of_a_row():
    batch = _packed([3, 1, 2, 0], 4, pad_token=99)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 99, 99]]
    assert batch.targets.tolist() == [[2, 3, NONE, NONE, 6, NONE, NONE, NONE]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert batch.loss_mask.tolist() == [[value != NONE for value in batch.targets[0].tolist()]]
    assert batch.params.lengths == (3, 1, 0, 2, 2)
    assert (batch.num_targets, batch.loss_weight) == (3, 1 / 3)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=20))
def test_every_token_lies_in_a_row_once_before_its_successor(lengths):
    batch = _packed(lengths, 12)
    tokens, targets = batch.tokens[0], batch.targets[0]
    assert sorted(tokens[tokens > 0].tolist()) == list(range(1, sum(lengths) + 1))
    learned = targets != NONE
    assert torch.equal(targets[learned], tokens[learned] + 1)
    assert int(learned.sum()) == sum(max(0, length - 1) for length in lengths) == batch.num_targets
    assert tokens.numel() % 12 == 0
    assert batch.params.max_seqlen_q == max([1, *lengths])
    # A document lies in one bin.
    bins = torch.arange(tokens.numel()) // 12
    assert torch.equal(bins, bins[batch.params.cu_seqlens_q[batch.seq_idx[0]].long()])


def test_a_row_of_some_bins():
    lengths = [3, 1, 2, 4]
    whole = _packed(lengths, 4, pad_token=99)  # the fourth; the first and second; the third
    batch = _packed(lengths, 4, pad_token=99, bins=[2, 0])
    rows = whole.tokens.view(-1, 4)
    assert torch.equal(batch.tokens.view(-1, 4), rows[[2, 0]])
    assert torch.equal(batch.targets.view(-1, 4), whole.targets.view(-1, 4)[[2, 0]])
    assert batch.params.lengths == (2, 2, 4)
    assert batch.num_targets == 4
    assert _packed(lengths, 4, bins=[]).tokens.shape == (1, 0)
    for number in (3, -1):
        with pytest.raises(IndexError, match=f"bins: expected numbers from 0 to 2, got {number}"):
            _packed(lengths, 4, bins=[number])


def test_padding_is_no_longer_than_the_documents():
    assert _packed([2, 2, 2], 9).params.lengths == (2, 2, 2, 2, 1)


@pytest.mark.parametrize("lengths", [[], [0], [1, 1]], ids=["none", "empty", "one_token"])
def test_nothing_to_learn_is_a_loss_of_zero(lengths):
    batch = _packed(lengths, 4)
    logits = torch.randn(*batch.tokens.shape, 7, requires_grad=True)
    loss = batch.loss(logits)
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()


def test_loss_is_the_mean_over_what_is_predicted():
    batch = _packed([3, 1, 2], 4)
    logits = torch.randn(*batch.tokens.shape, 7)
    log_probabilities = logits.log_softmax(-1)[0]
    picked = [log_probabilities[0, 2], log_probabilities[1, 3], log_probabilities[4, 6]]
    torch.testing.assert_close(batch.loss(logits), -sum(picked) / 3)


def test_targets_of_ones_own():
    sequences = [torch.tensor([5, 6], dtype=torch.uint8), torch.tensor([7], dtype=torch.uint8)]
    targets = [torch.tensor([NONE, 8]), torch.tensor([9])]
    batch = pack_batch(sequences, pack([2, 1], 4), targets=targets)
    assert batch.tokens.tolist() == [[5, 6, 7, 0]]
    assert batch.targets.tolist() == [[NONE, 8, 9, NONE]]
    assert batch.num_targets == 2


def test_a_batch_moves_as_a_whole():
    moved = _packed([3, 2], 4).to("meta")
    devices = {part.device.type for part in (moved.tokens, moved.targets, moved.seq_idx)}
    assert devices == {"meta"}
    assert moved.params.cu_seqlens_q.device.type == "meta"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sequences": _sequences([3])}, "the 2 sequences of the plan, .* got 1;"),
        ({"sequences": _sequences([3, 3])}, "5 tokens in bin 0, as the plan has it, got 6"),
        ({"targets": _sequences([2, 2])}, "targets as long as .* 2 for the 3 tokens of sequence 0"),
        ({"targets": _sequences([3])}, "the 2 sequences of the plan, .* got 2 and 1"),
    ],
    ids=["number", "lengths", "targets", "number of targets"],
)
def test_sequences_of_another_plan_are_refused(change, expected):
    with pytest.raises(ValueError, match=expected):
        pack_batch(**{"sequences": _sequences([3, 2]), "plan": pack([3, 2], 8)} | change)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([1, 2], "got list as number 0"),
        (torch.ones(2), r"got torch.float32 \[2\] on cpu"),
        (torch.ones(2, 1, dtype=torch.int64), r"got torch.int64 \[2, 1\]"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "on meta"),
    ],
    ids=["list", "float", "matrix", "elsewhere"],
)
def test_rows_of_something_else_are_refused(row, found):
    plan = pack([2], 4)
    with pytest.raises(TypeError, match=f"expected sequences to be .*{found}"):
        pack_batch([row], plan)
    with pytest.raises(TypeError, match=f"expected targets to be .*{found}"):
        pack_batch([torch.zeros(2, dtype=torch.int64)], plan, targets=[row])
