import pytest
import torch

from sidestream.training.data import Share, draw_batch, held_out_batch, load_corpus, mix_seed
from sidestream.training.errors import DataError, OptionsError

SEQ_LEN = 16


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(range(256)) * 20)
    return str(path)


@pytest.fixture(scope="module")
def corpus(text_file):
    return load_corpus(text_file, seq_len=SEQ_LEN)


def _step(corpus, *, world_size, accumulate, seed=0, step=1):
    parts = []
    for microbatch in range(accumulate):
        for rank in range(world_size):
            share = Share(12, accumulate, rank, world_size)
            parts.append(
                draw_batch(
                    corpus, share, seed=seed, step=step, microbatch=microbatch, seq_len=SEQ_LEN
                )
            )
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("world_size", "accumulate"),
    [(2, 1), (1, 2), (3, 2), (4, 3)],
    ids=["2_ranks", "2_microbatches", "3_ranks_2_microbatches", "4_ranks_3_microbatches"],
)
def test_ranks_and_microbatches_deal_out_the_same_sequences(corpus, world_size, accumulate):
    whole = _step(corpus, world_size=1, accumulate=1)
    assert torch.equal(_step(corpus, world_size=world_size, accumulate=accumulate), whole)


def test_draws_depend_on_seed_and_step_only(corpus):
    first = _step(corpus, world_size=1, accumulate=1, seed=3, step=7)
    torch.manual_seed(99)
    assert torch.equal(_step(corpus, world_size=1, accumulate=1, seed=3, step=7), first)
    assert not torch.equal(_step(corpus, world_size=1, accumulate=1, seed=3, step=8), first)
    assert not torch.equal(_step(corpus, world_size=1, accumulate=1, seed=4, step=7), first)


def test_sequences_are_runs_of_the_training_bytes(corpus):
    tokens = _step(corpus, world_size=1, accumulate=1)
    assert tokens.shape == (12, SEQ_LEN + 1)
    assert tokens.dtype == torch.int64
    # The text counts up modulo 256, so every sequence must, too.
    assert torch.equal((tokens[:, 1:] - tokens[:, :-1]) % 256, torch.ones(12, SEQ_LEN).long())


def test_held_out_sequences_are_dealt_to_ranks_and_stay_inside(corpus):
    def of(rank, world_size):
        return held_out_batch(corpus, Share(4, 1, rank, world_size), seq_len=SEQ_LEN)

    whole = of(0, 1)
    assert torch.equal(torch.cat([of(0, 2), of(1, 2)]), whole)
    assert torch.equal(whole[0], corpus.held_out[: SEQ_LEN + 1].long())
    assert torch.equal(whole[-1], corpus.held_out[-SEQ_LEN - 1 :].long())


def test_split_keeps_every_byte_once(corpus, text_file):
    with open(text_file, "rb") as stream:
        content = stream.read()
    assert bytes(torch.cat([corpus.train, corpus.held_out]).tolist()) == content


def test_folder_is_read_sorted_without_hidden_and_binary_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "1.txt").write_bytes(b"B" * 100)
    (tmp_path / "a.txt").write_bytes(b"A" * 100)
    (tmp_path / "image.png").write_bytes(b"\0" * 100)
    (tmp_path / ".git" / "config").write_bytes(b"G" * 100)
    (tmp_path / ".hidden").write_bytes(b"H" * 100)
    corpus = load_corpus(str(tmp_path), seq_len=4)
    assert bytes(torch.cat([corpus.train, corpus.held_out]).tolist()) == b"A" * 100 + b"B" * 100
    assert corpus.num_files == 2


def test_documents_end_where_files_do(tmp_path):
    sizes = [30, 0, 50, 20, 10]
    for name, size in enumerate(sizes):
        (tmp_path / str(name)).write_bytes(b"x" * size)
    # 110 bytes, of which two sequences of 4 + 1 are held out: the last file as a whole.
    assert load_corpus(str(tmp_path), seq_len=4).document_ends.tolist() == [30, 30, 80, 100]
    # Two of 8 + 1: the file before it in part.
    assert load_corpus(str(tmp_path), seq_len=8).document_ends.tolist() == [30, 30, 80, 92]
    limited = load_corpus(str(tmp_path), seq_len=4, max_bytes=60)
    assert limited.document_ends.tolist() == [30, 30, 50]
    assert limited.document_ends.dtype == torch.int64


def test_no_more_than_the_limit_is_read(text_file):
    assert load_corpus(text_file, seq_len=SEQ_LEN, max_bytes=1000).num_bytes == 1000


def test_default_is_the_standard_library():
    first = load_corpus(None, seq_len=128, max_bytes=1 << 20)
    second = load_corpus(None, seq_len=128, max_bytes=1 << 20)
    assert first.num_bytes == 1 << 20
    assert first.sha256 == second.sha256
    assert b"import" in bytes(first.train.tolist())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, "nothing there"),
        (lambda path: path.mkdir(), "got 0 from 0 text files"),
        (lambda path: path.write_bytes(b""), "got 0 from 1 text files"),
        (lambda path: path.write_bytes(b"x" * 67), "expected at least 68 bytes .* got 67"),
    ],
    ids=["missing", "empty_folder", "empty_file", "too_short"],
)
def test_unusable_data_is_refused(tmp_path, make, expected):
    path = tmp_path / "data"
    make(path)
    with pytest.raises(DataError, match=expected):
        load_corpus(str(path), seq_len=SEQ_LEN)


@pytest.mark.parametrize("path", ["d" * 300, "zero\0byte"], ids=["long", "zero byte"])
def test_a_path_that_cannot_be_is_refused(path):
    with pytest.raises(DataError, match=r"expected a file or a folder at --data .*, got nothing"):
        load_corpus(path, seq_len=SEQ_LEN)


def test_shortest_text_still_gives_batches(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * 4 * (SEQ_LEN + 1))
    corpus = load_corpus(str(path), seq_len=SEQ_LEN)
    assert _step(corpus, world_size=1, accumulate=1).shape == (12, SEQ_LEN + 1)
    share = Share(5, 1, 0, 1)
    assert held_out_batch(corpus, share, seq_len=SEQ_LEN).shape == (5, SEQ_LEN + 1)


def test_unreadable_data_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "data.txt"
    path.write_bytes(b"x" * 1000)

    def refuse(self, *_):
        raise PermissionError(13, "Permission denied", str(self))

    # Not chmod: the superuser may read everything.
    monkeypatch.setattr("sidestream.sharding.storage.local.open_regular", refuse)
    with pytest.raises(DataError, match=r"Permission denied.*check the permissions"):
        load_corpus(str(path), seq_len=SEQ_LEN)


@pytest.mark.parametrize("batch", [0, 5, 8], ids=str)
def test_batch_that_cannot_be_shared_is_refused_with_one_that_can(batch):
    with pytest.raises(OptionsError, match=r"3 ranks x 2 microbatches .* pass --batch 6"):
        Share(batch, 2, 0, 3)


def test_seeds_differ_in_every_argument():
    seeds = {mix_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
