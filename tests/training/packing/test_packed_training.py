"""Packed training against the same documents padded, one a row."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import sidestream as ss
from sidestream.tests.ranks import preload, run_on_ranks
from sidestream.tests.sharding.twins import LEVELS
from sidestream.training.data import Corpus, Share
from sidestream.training.model import Block, GPTConfig, build_model
from sidestream.training.packed_corpus import draw_packed_batch, pack_corpus
from sidestream.training.packing import IGNORED_TARGET, PackedSeqParams, pack, pack_batch

preload("sidestream.training.packing", "sidestream.training.model")

CONFIG = GPTConfig(num_layers=2, width=32, num_heads=2, context=16)
LENGTHS = [16, 3, 9, 1, 7, 0, 12, 4, 16, 2]
FILE_BYTES = [40, 1, 17, 5, 2, 33, 9, 16, 70]
BATCH, ACCUMULATE = 12, 3


def _documents(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (length,), generator=generator) for length in lengths]


def _padded_loss(model, tokens, targets):
    """The mean over all targets of documents that are padded to `context` each."""
    longest = CONFIG.context
    inputs = torch.stack([F.pad(part, (0, longest - len(part))) for part in tokens])
    expected = torch.stack(
        [F.pad(part, (0, longest - len(part)), value=IGNORED_TARGET) for part in targets]
    )
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), expected.flatten(), ignore_index=IGNORED_TARGET)


def _grads(model, loss):
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def _assert_within_rounding(got, expected, num_tokens):
    """The same sums over `num_tokens` tokens in another order: relative to the whole tensor, an eps
    a term (Higham 2002, section 4.2).
    """
    for name, value in expected.items():
        bound = num_tokens * torch.finfo(value.dtype).eps * value.norm()
        assert (got[name] - value).norm() <= bound, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_loss_and_gradients_are_those_of_padded_documents(dtype):
    model = build_model(CONFIG, seed=0).to(dtype)
    documents = _documents(LENGTHS)
    batch = pack_batch(documents, pack(LENGTHS, 24))
    log_probabilities = model(batch.tokens, batch.params).log_softmax(-1)
    packed_loss = F.nll_loss(
        log_probabilities[0], batch.targets[0], ignore_index=IGNORED_TARGET, reduction="sum"
    )
    packed_loss = packed_loss * batch.loss_weight
    learned = [document for document in documents if len(document) > 1]
    padded_loss = _padded_loss(
        model, [document[:-1] for document in learned], [document[1:] for document in learned]
    )
    eps = torch.finfo(dtype).eps
    total = batch.tokens.numel()
    assert abs(packed_loss - padded_loss) <= total * eps * padded_loss
    _assert_within_rounding(_grads(model, packed_loss), _grads(model, padded_loss), total)


def test_documents_of_one_length_are_a_batch_bit_for_bit():
    model = build_model(CONFIG, seed=0)
    tokens = torch.stack(_documents([16] * 6))
    params = PackedSeqParams.from_lengths([16] * 6)
    packed, plain = model(tokens.reshape(1, -1), params), model(tokens)
    assert torch.equal(packed.reshape(plain.shape), plain)
    weights = torch.randn(plain.shape, generator=torch.Generator().manual_seed(2))
    got = _grads(model, (packed.reshape(plain.shape) * weights).sum())
    expected = _grads(model, (plain * weights).sum())
    # A batch sums the gradients of a position over its rows at once, a row one after another.
    name = "position_embedding.weight"
    _assert_within_rounding({name: got.pop(name)}, {name: expected.pop(name)}, tokens.shape[0])
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_a_document_is_the_same_beside_any_other():
    model = build_model(CONFIG, seed=0)
    documents = _documents([9, 16, 7])
    params = PackedSeqParams.from_lengths([9, 16, 7])
    before = model(torch.cat(documents)[None], params)
    documents[1] = (documents[1] + 1) % 256
    after = model(torch.cat(documents)[None], params)
    assert torch.equal(before[:, :9], after[:, :9])
    assert torch.equal(before[:, 25:], after[:, 25:])
    assert not torch.equal(before[:, 9:25], after[:, 9:25])


def _corpus():
    train = torch.cat(_documents(FILE_BYTES)).to(torch.uint8)
    ends = torch.tensor(FILE_BYTES).cumsum(0)
    return Corpus(train, train[:0], len(FILE_BYTES), "a test", "", ends)


def _padded_step():
    """Loss and gradients of a whole step on one rank, documents padded."""
    packed = pack_corpus(_corpus(), seq_len=CONFIG.context)
    batch = draw_packed_batch(packed, Share(BATCH, 1, 0, 1), seed=0, step=1, microbatch=0)
    lengths = list(batch.params.lengths)
    model = build_model(CONFIG, seed=0)
    tokens, targets = batch.tokens[0].split(lengths), batch.targets[0].split(lengths)
    loss = _padded_loss(model, tokens, targets)
    return loss.detach(), _grads(model, loss), batch.tokens.numel()


def _packed_steps(rank, world_size):
    return {zero: _packed_step(rank, world_size, zero) for zero in LEVELS[world_size]}


def _packed_step(rank, world_size, zero):
    model = build_model(CONFIG, seed=0)
    ss.fully_shard(model, None, zero_dp_strategy=zero, fsdp_unit_modules=[Block])
    packed = pack_corpus(_corpus(), seq_len=CONFIG.context)
    share = Share(BATCH, ACCUMULATE, rank, world_size)
    total, counts = torch.zeros(()), set()
    for microbatch in range(ACCUMULATE):
        batch = draw_packed_batch(packed, share, seed=0, step=1, microbatch=microbatch)
        is_last = microbatch == ACCUMULATE - 1
        with contextlib.nullcontext() if is_last else ss.no_sync(model):
            loss = batch.loss(model(batch.tokens, batch.params))
            loss.backward()
        total += loss.detach()
        counts.add(batch.num_targets)
    assert len(counts) > 1, "microbatches of unequal weight"
    torch.distributed.all_reduce(total)
    grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    return total / world_size, grads


def test_ranks_and_microbatches_learn_the_mean_over_all_targets():
    loss, expected, num_tokens = _padded_step()
    steps = [step for levels in run_on_ranks(_packed_steps, 2) for step in levels.values()]
    assert len(steps) == 2 * len(LEVELS[2])
    for got_loss, grads in steps:
        assert abs(got_loss - loss) <= num_tokens * torch.finfo(loss.dtype).eps * loss
        _assert_within_rounding(grads, expected, num_tokens)


@pytest.mark.parametrize(
    ("lengths", "tokens", "expected"),
    [
        ([17], 17, "at most 16 tokens, got 17"),
        ([8, 8], 15, r"packed tokens \[1, 16\], got \[1, 15\]"),
    ],
    ids=["long_document", "other_row"],
)
def test_rows_that_do_not_fit_the_model_are_refused(lengths, tokens, expected):
    model = build_model(CONFIG, seed=0)
    with pytest.raises(ValueError, match=expected):
        model(torch.zeros(1, tokens, dtype=torch.int64), PackedSeqParams.from_lengths(lengths))


# What inductor imports uses what torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize(
    ("compiler", "num_batches"),
    # A second batch of other documents is compiled anew.
    [
        pytest.param("aot_eager", 2, id="aot_eager"),
        pytest.param("inductor", 1, id="inductor", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_learns_the_same(compiler, num_batches):
    model = build_model(replace(CONFIG, num_layers=1), seed=0)
    compiled = torch.compile(model, backend=compiler, fullgraph=True, dynamic=False)
    for order in (LENGTHS, LENGTHS[::-1])[:num_batches]:
        batch = pack_batch(_documents(order), pack(order, 24))
        batches = [batch.loss(m(batch.tokens, batch.params)) for m in (model, compiled)]
        plain, got = (_grads(model, loss) for loss in batches)
        _assert_within_rounding(got, plain, batch.tokens.numel())
