import copy
import dataclasses

import pytest
import torch

from sidestream.training.packing import PackedSeqParams, document_block_mask, document_mask

LENGTHS = [3, 0, 2, 4, 1]


def _offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def test_every_token_knows_its_document_and_place():
    params = PackedSeqParams.from_lengths(LENGTHS)
    assert params.cu_seqlens_q.tolist() == [0, 3, 3, 5, 9, 10]
    assert params.seq_idx.tolist() == [[0, 0, 0, 2, 2, 3, 3, 3, 3, 4]]
    assert params.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 0]]
    assert (params.max_seqlen_q, params.total_tokens) == (4, 10)
    assert params.lengths == tuple(LENGTHS)
    dtypes = [params.cu_seqlens_q.dtype, params.seq_idx.dtype, params.position_ids.dtype]
    assert dtypes == [torch.int32, torch.int32, torch.int64]
    assert params.cu_seqlens_kv is params.cu_seqlens_q
    assert params.max_seqlen_kv == params.max_seqlen_q


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 1]], ids=str)
def test_hardly_any_tokens(lengths):
    params = PackedSeqParams.from_lengths(lengths)
    assert params.seq_idx.shape == params.position_ids.shape == (1, sum(lengths))


def test_fields_of_megatron_are_taken():
    offsets = _offsets(0, 2, 5)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=3,
        max_seqlen_kv=3,
        total_tokens=5,
    )
    assert params.seq_idx.tolist() == [[0, 0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cu_seqlens_q": _offsets(0, 3, dtype=torch.int64)}, r"int32 .*, got torch.int64 \[2\]"),
        ({"cu_seqlens_q": _offsets()}, r"got torch.int32 \[0\]"),
        ({"cu_seqlens_q": _offsets(1, 3)}, "start at 0, got 1"),
        ({"cu_seqlens_q": _offsets(0, 3, 2)}, "got -1 in document 1"),
        ({"cu_seqlens_q": _offsets(0, 5)}, "0 to max_seqlen_q = 4 tokens, got 5 in document 0"),
        ({"cu_seqlens_kv": _offsets(0, 3)}, "cu_seqlens_kv to be the tensor cu_seqlens_q"),
        ({"max_seqlen_kv": 3}, "max_seqlen_kv to be max_seqlen_q, 4, got 3"),
        ({"qkv_format": "bshd"}, "qkv_format 'thd'.*, got 'bshd'"),
        ({"total_tokens": 9}, "total_tokens 3, where cu_seqlens_q ends, got 9; make the padding"),
        ({"seq_idx": torch.zeros(3, dtype=torch.int32)}, r"seq_idx int32 \[1, 3\], got"),
        ({"seq_idx": torch.zeros(1, 3)}, "got torch.float32"),
        ({"seq_idx": torch.ones(1, 3, dtype=torch.int32)}, "from 0, got other numbers"),
        (
            {"cu_seqlens_q": torch.zeros(2, dtype=torch.int32, device="meta")},
            "total_tokens beside offsets on meta, got None",
        ),
    ],
    ids=[
        "int64",
        "no_offset",
        "start",
        "decreasing",
        "longest",
        "other_keys",
        "other_longest",
        "format",
        "tail",
        "seq_idx_shape",
        "seq_idx_dtype",
        "seq_idx_numbers",
        "unknown_total",
    ],
)
def test_contradictions_are_refused(fields, expected):
    given = {"cu_seqlens_q": _offsets(0, 3), "max_seqlen_q": 4}
    with pytest.raises(ValueError, match=expected):
        PackedSeqParams(**given | fields)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([2, -1], "got -1 in document 1"), ([2**31], "at most 2147483647 tokens")],
    ids=["negative", "too_many"],
)
def test_lengths_that_cannot_be_are_refused(lengths, expected):
    with pytest.raises(ValueError, match=expected):
        PackedSeqParams.from_lengths(lengths)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PackedSeqParams.from_lengths([1.5, 2]),
        lambda: PackedSeqParams.from_lengths([1], max_seqlen=3.5),
        lambda: PackedSeqParams(cu_seqlens_q=[0, 2], max_seqlen_q=2),
    ],
    ids=["length", "longest", "list"],
)
def test_what_is_no_number_of_tokens_is_refused(make):
    with pytest.raises(TypeError, match=r"as an integer|int32 .*, got list"):
        make()


def test_moved_they_keep_what_the_host_knows():
    params = PackedSeqParams.from_lengths(LENGTHS, max_seqlen=7)
    moved = params.to("meta", non_blocking=True)
    assert moved.cu_seqlens_q.device.type == moved.seq_idx.device.type == "meta"
    assert moved.cu_seqlens_kv is moved.cu_seqlens_q
    assert (moved.lengths, moved.total_tokens, moved.max_seqlen_kv) == (tuple(LENGTHS), 10, 7)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
def test_masks_are_those_of_the_definition(causal):
    params = PackedSeqParams.from_lengths(LENGTHS)
    document = params.seq_idx[0].tolist()
    expected = torch.tensor(
        [
            [
                document[row] == document[column] and (column <= row or not causal)
                for column in range(10)
            ]
            for row in range(10)
        ]
    )
    assert torch.equal(document_mask(params, causal=causal), expected)
    seen_by = document_block_mask(params, causal=causal).mask_mod
    index = torch.arange(10)
    zero = torch.tensor(0)
    assert torch.equal(seen_by(zero, zero, index[:, None], index[None]), expected)


def test_a_mask_is_made_once_for_all_copies_of_a_batch():
    params = PackedSeqParams.from_lengths(LENGTHS)
    assert document_mask(copy.copy(params)) is document_mask(params)
    # What torch's FSDP2 does: every field anew.
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    assert document_mask(dataclasses.replace(params, **fields)) is document_mask(params)
    assert document_mask(params.to("meta")).device.type == "meta"
    assert document_mask(params, causal=False) is not document_mask(params)
