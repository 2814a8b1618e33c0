"""Attention in packed rows on a GPU: every way against SDPA of each document in FP64 on the CPU."""

import pytest
import torch

from sidestream.training.model import GPTConfig, build_model
from sidestream.training.packing import PackedSeqParams, pack, pack_batch, packed_attention

pytestmark = pytest.mark.gpu

LENGTHS = [300, 128, 128, 1, 0, 77, 6]
TOTAL, HEADS, HEAD_DIM = sum(LENGTHS), 4, 64


def _attended(inputs, params, **options):
    mixed = packed_attention(*inputs, params, **options)
    (grad,) = torch.autograd.grad(mixed.float().cos().sum(), inputs)
    return mixed.detach().cpu().double(), grad.cpu().double()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("varlen", torch.bfloat16),
        ("varlen", torch.float16),
        ("flex", torch.float32),
        ("flex", torch.bfloat16),
        ("documents", torch.bfloat16),
        ("documents", torch.float32),
        ("mask", torch.float32),
    ],
    ids=lambda value: str(value).rpartition(".")[2],
)
def test_every_way_is_within_rounding_of_the_definition(way, dtype, causal):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, TOTAL, HEADS, HEAD_DIM, generator=generator).to(dtype)
    on_cpu = values.double().requires_grad_()
    on_gpu = values.cuda().requires_grad_()
    params = PackedSeqParams.from_lengths(LENGTHS)
    expected = _attended(on_cpu, params, causal=causal, way="documents")
    got = _attended(on_gpu, params.to("cuda"), causal=causal, way=way)
    # Scores, weights and the result are rounded to dtype once each, sums are in FP32.
    eps = torch.finfo(dtype).eps
    for one, other in zip(got, expected, strict=True):
        assert (one - other).norm() <= 8 * eps * other.norm()
        assert (one - other).abs().max() <= 32 * eps * other.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_learns_what_it_learns_on_a_cpu(dtype, compiled):
    model = build_model(GPTConfig(num_layers=2, width=64, num_heads=2, context=64), seed=0)
    lengths = [64, 30, 9, 64, 1, 22]
    documents = list(torch.randint(256, (sum(lengths),)).split(lengths))
    batch = pack_batch(documents, pack(lengths, 64))
    expected = batch.loss(model(batch.tokens, batch.params))
    expected.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    model.to("cuda", dtype)
    moved = batch.pin_memory().to("cuda", non_blocking=True)
    forward = torch.compile(model, fullgraph=True) if compiled else model
    loss = moved.loss(forward(moved.tokens, moved.params))
    loss.backward()
    bound = 64 * torch.finfo(dtype).eps
    assert abs(loss.item() - expected.item()) <= bound * expected.item()
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert (param.grad.cpu().float() - grad).norm() <= bound * grad.norm()


def test_offsets_that_the_host_has_not_read_need_no_wait():
    params = PackedSeqParams.from_lengths(LENGTHS)
    offsets = params.cu_seqlens_q.cuda()
    inputs = torch.randn(3, TOTAL, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    known = packed_attention(*inputs, params.to("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        unread = PackedSeqParams(cu_seqlens_q=offsets, max_seqlen_q=300, total_tokens=TOTAL)
        mixed = packed_attention(*inputs, unread)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(mixed, known)
    assert torch.equal(unread.seq_idx.cpu(), params.seq_idx)
