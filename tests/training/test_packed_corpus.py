import pytest
import torch

from sidestream.training.data import Corpus, Share, load_corpus
from sidestream.training.errors import DataError
from sidestream.training.packed_corpus import draw_packed_batch, pack_corpus
from sidestream.training.packing import IGNORED_TARGET

SEQ_LEN = 16
FILE_BYTES = [40, 1, 0, 17, 5, 2, 33, 9, 16, 70]


def _corpus(file_bytes):
    """Files whose bytes say which file it is (high four bits) and count up (low four)."""
    parts = [
        (torch.arange(count) % 16 + 16 * file).to(torch.uint8)
        for file, count in enumerate(file_bytes)
    ]
    ends = torch.tensor(file_bytes).cumsum(0)
    train = torch.cat(parts)
    return Corpus(train, train[:0], len(file_bytes), "a test", "", ends)


@pytest.fixture(scope="module")
def packed():
    return pack_corpus(_corpus(FILE_BYTES), seq_len=SEQ_LEN)


def _draw(packed, *, world_size=1, accumulate=1, seed=0, step=1):
    return [
        draw_packed_batch(
            packed, Share(12, accumulate, rank, world_size), seed=seed, step=step, microbatch=number
        )
        for number in range(accumulate)
        for rank in range(world_size)
    ]


def test_every_byte_but_the_first_of_a_file_is_predicted_once(packed):
    predicted = torch.cat(
        [
            start + 1 + torch.arange(length)
            for start, length in zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True)
        ]
    )
    ends = torch.tensor(FILE_BYTES).cumsum(0).tolist()
    firsts = {end - count for end, count in zip(ends, FILE_BYTES, strict=True) if count}
    assert sorted(predicted.tolist()) == [i for i in range(sum(FILE_BYTES)) if i not in firsts]
    assert int(packed.lengths.max()) == SEQ_LEN
    placed = sorted(piece for bin_ in packed.plan.bins for piece in bin_)
    assert placed == list(range(len(packed.starts)))


def test_a_row_has_whole_bins_and_no_document_of_two_files(packed):
    (batch,) = _draw(packed)
    assert batch.tokens.shape == (1, 12 * SEQ_LEN)
    learned = batch.targets != IGNORED_TARGET
    assert torch.equal(batch.tokens[learned] // 16, batch.targets[learned] // 16)
    assert torch.equal((batch.tokens[learned] + 1) % 16, batch.targets[learned] % 16)
    start = batch.params.cu_seqlens_q[batch.seq_idx[0]].long()
    assert torch.equal(batch.tokens[learned] // 16, batch.tokens[0][start][None][learned] // 16)
    assert batch.params.max_seqlen_q == SEQ_LEN


@pytest.mark.parametrize(
    ("world_size", "accumulate"),
    [(2, 1), (1, 2), (3, 2), (4, 3)],
    ids=["2_ranks", "2_microbatches", "3_ranks_2_microbatches", "4_ranks_3_microbatches"],
)
def test_ranks_and_microbatches_deal_out_the_same_rows(packed, world_size, accumulate):
    (whole,) = _draw(packed)
    parts = _draw(packed, world_size=world_size, accumulate=accumulate)
    assert torch.equal(torch.cat([part.tokens for part in parts], 1), whole.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts], 1), whole.targets)
    weights = {part.loss_weight for part in parts}
    assert weights == {world_size / sum(part.num_targets for part in parts)}


def test_draws_depend_on_seed_and_step_only(packed):
    def tokens(**options):
        return _draw(packed, **options)[0].tokens

    first = tokens(seed=3, step=7)
    torch.manual_seed(99)
    assert torch.equal(tokens(seed=3, step=7), first)
    assert not torch.equal(tokens(seed=3, step=8), first)
    assert not torch.equal(tokens(seed=4, step=7), first)


def test_the_standard_library_wastes_less_than_3_percent():
    corpus = load_corpus(None, seq_len=512, max_bytes=4 << 20)
    packed = pack_corpus(corpus, seq_len=512)
    assert packed.plan.waste < 0.01  # 0.1 % when this was written
    assert len(packed.plan.bins) > 7000
    assert f"{len(packed.plan.bins):,} rows of 512 tokens" in packed.described


@pytest.mark.parametrize("file_bytes", [[1, 0, 1], [0]], ids=["single_bytes", "empty"])
def test_files_that_predict_nothing_are_refused(file_bytes):
    with pytest.raises(DataError, match="at least 2 bytes to pack, got none in a test"):
        pack_corpus(_corpus(file_bytes), seq_len=SEQ_LEN)
