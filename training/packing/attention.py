"""Attention inside the documents of a packed row, by the best of four ways that this call can go.

    way        what runs                              cost         needs
    varlen     torch.nn.attention.varlen              documents^2  sm_80, FP16 or BF16, no dropout
    flex       torch.nn.attention.flex_attention      documents^2  a GPU, no dropout
    documents  SDPA for each run of equal documents   documents^2  lengths on the host, no compiler
    mask       SDPA of the whole row with a mask      row^2

On a CPU of one core, `documents` was 3 to 6 times as fast as `mask`, forward and backward, on rows
of 1024 to 4096 tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .masks import document_block_mask, document_mask
from .params import PackedSeqParams

VARLEN_DTYPES = (torch.float16, torch.bfloat16)
VARLEN_MAX_HEAD_DIM = 256
VARLEN_HEAD_DIM_MULTIPLE = 8
VARLEN_CAPABILITY = (8, 0)
FLEX_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLEX_MIN_HEAD_DIM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """All that the choice of a way depends on. `capability`: of the GPU; None: there is none.
    `lengths_known`: on the host.
    """

    dtype: torch.dtype
    head_dim: int
    dropout_p: float
    capability: tuple[int, int] | None
    lengths_known: bool
    compiling: bool

    @classmethod
    def on(
        cls,
        device: torch.device,
        *,
        dtype: torch.dtype,
        head_dim: int,
        dropout_p: float = 0.0,
        lengths_known: bool = True,
    ) -> "AttentionCall":
        """Return the call on `device` with the installed torch, from where this is called."""
        on_gpu = device.type == "cuda"
        return cls(
            dtype=dtype,
            head_dim=head_dim,
            dropout_p=dropout_p,
            capability=torch.cuda.get_device_capability(device) if on_gpu else None,
            lengths_known=lengths_known,
            compiling=torch.compiler.is_compiling(),
        )


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The way that is taken, and why each better one is not: (way, reason)."""

    way: str
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """In words: `documents (varlen: needs a GPU; flex: needs a GPU)`."""
        reasons = "; ".join(f"{way}: {reason}" for way, reason in self.passed_over)
        return f"{self.way} ({reasons})" if reasons else self.way


def choose_attention(call: AttentionCall) -> AttentionChoice:
    """Return the first way of the table above that can do `call`.

        call = AttentionCall.on(torch.device("cpu"), dtype=torch.float32, head_dim=64)
        print(choose_attention(call))

    writes `documents (varlen: needs a GPU; flex: needs a GPU)`.
    """
    passed_over: list[tuple[str, str]] = []
    for way, obstacle in _OBSTACLES.items():
        reason = obstacle(call)
        if reason is None:
            return AttentionChoice(way, tuple(passed_over))
        passed_over.append((way, reason))
    raise AssertionError("the last way has no obstacle")


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: PackedSeqParams,
    *,
    dropout_p: float = 0.0,
    causal: bool = True,
    way: str | None = None,
) -> Tensor:
    """Return softmax(query key^T / sqrt(head_dim)) value inside each document, [total_tokens,
    heads, head_dim]; with `causal`, a token sees none after it.

    query, key, value: [total_tokens, heads, head_dim] of one dtype, on the device of `params`.
    way: one of the table above instead of the best.

    Raises:
        ValueError: shapes or devices do not fit, `dropout_p` is no probability below 1, or the way
        that was asked for cannot be gone.
    """
    _check(query, key, value, params, dropout_p)
    if way is None:
        way = choose_attention(_call_of(query, params, dropout_p)).way
    else:
        _check_way(way, _call_of(query, params, dropout_p))
    return _WAYS[way](query, key, value, params, dropout_p, causal)


def _check(
    query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams, dropout_p: float
) -> None:
    if query.dim() != 3 or not query.shape == key.shape == value.shape:  # noqa: PLR2004
        raise ValueError(
            "expected query, key and value of one shape [total_tokens, heads, head_dim], got "
            f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}; repeat keys and "
            "values that heads share"
        )
    if query.shape[0] != params.total_tokens:
        raise ValueError(
            f"expected {params.total_tokens} tokens, as the params say, got {query.shape[0]}; pass "
            "the params of this row"
        )
    if query.device != params.cu_seqlens_q.device:
        raise ValueError(
            f"expected the params on {query.device}, got {params.cu_seqlens_q.device}; move them "
            "with .to(device)"
        )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"expected 0 <= dropout_p < 1, got {dropout_p}; pass 0 to switch it off")


def _check_way(way: str, call: AttentionCall) -> None:
    if way not in _WAYS:
        raise ValueError(
            f"expected a way among {', '.join(_WAYS)}, got {way!r}; leave it out for the best"
        )
    reason = _OBSTACLES[way](call)
    if reason is not None:
        raise ValueError(
            f"expected a call that attention by {way} can do, got one that it cannot: {reason}; "
            "leave the way out for the best"
        )


def _call_of(query: Tensor, params: PackedSeqParams, dropout_p: float) -> AttentionCall:
    return AttentionCall.on(
        query.device,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        dropout_p=dropout_p,
        lengths_known=params.host_offsets is not None,
    )


def _varlen_obstacle(call: AttentionCall) -> str | None:
    if call.capability is None:
        return "needs a GPU"
    if call.capability < VARLEN_CAPABILITY:
        return "needs sm_80 or newer"
    if call.dtype not in VARLEN_DTYPES:
        return f"needs FP16 or BF16, not {call.dtype}"
    if call.head_dim > VARLEN_MAX_HEAD_DIM or call.head_dim % VARLEN_HEAD_DIM_MULTIPLE:
        return f"needs heads of a multiple of 8 up to 256, not {call.head_dim}"
    return "has no dropout" if call.dropout_p else None


def _flex_obstacle(call: AttentionCall) -> str | None:
    if call.capability is None:
        return "needs a GPU"
    if call.dtype not in FLEX_DTYPES:
        return f"needs FP32, FP16 or BF16, not {call.dtype}"
    if call.head_dim < FLEX_MIN_HEAD_DIM:
        return f"needs heads of at least 16, not {call.head_dim}"
    return "has no dropout" if call.dropout_p else None


def _documents_obstacle(call: AttentionCall) -> str | None:
    if call.compiling:
        return "cannot be compiled"
    return None if call.lengths_known else "the lengths are on the GPU alone"


def _no_obstacle(_call: AttentionCall) -> None:
    return None


_OBSTACLES: dict[str, Callable[[AttentionCall], str | None]] = {
    "varlen": _varlen_obstacle,
    "flex": _flex_obstacle,
    "documents": _documents_obstacle,
    "mask": _no_obstacle,
}


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams, _: float, causal: bool
) -> Tensor:
    # Seconds of import, for those alone who use it.
    from torch.nn.attention.varlen import varlen_attn

    offsets, longest = params.cu_seqlens_q, params.max_seqlen_q
    window = (-1, 0) if causal else (-1, -1)
    mixed = varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=window)
    assert isinstance(mixed, Tensor), "nothing else was asked for"
    return mixed


def _flex(
    query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams, _: float, causal: bool
) -> Tensor:
    mixed: Tensor = _flex_function()(
        _as_one_sequence(query),
        _as_one_sequence(key),
        _as_one_sequence(value),
        block_mask=document_block_mask(params, causal=causal),
    )
    return mixed[0].transpose(0, 1)


def _flex_function() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention
    return _compiled_flex()


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """Uncompiled it would write all scores of the row to memory."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


def _documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: PackedSeqParams,
    dropout_p: float,
    causal: bool,
) -> Tensor:
    lengths = params.lengths
    assert lengths is not None, "an obstacle otherwise"
    groups = groupby(length for length in lengths if length)
    runs = [(len(list(group)), length) for length, group in groups] or [(1, 0)]
    # One split: the backward of slices would write a whole row of zeros for each.
    sizes = [count * length for count, length in runs]
    parts = zip(*(tensor.split(sizes) for tensor in (query, key, value)), strict=True)
    mixed = []
    for run, run_parts in zip(runs, parts, strict=True):
        run_query, run_key, run_value = (
            part.unflatten(0, run).transpose(1, 2) for part in run_parts
        )
        out = F.scaled_dot_product_attention(
            run_query, run_key, run_value, dropout_p=dropout_p, is_causal=causal
        )  # [documents of the run, heads, length, head_dim]
        mixed.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed)


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: PackedSeqParams,
    dropout_p: float,
    causal: bool,
) -> Tensor:
    mixed = F.scaled_dot_product_attention(
        _as_one_sequence(query),
        _as_one_sequence(key),
        _as_one_sequence(value),
        attn_mask=document_mask(params, causal=causal),
        dropout_p=dropout_p,
    )
    return mixed[0].transpose(0, 1)


def _as_one_sequence(tensor: Tensor) -> Tensor:
    """[total_tokens, heads, head_dim] as [1, heads, total_tokens, head_dim]."""
    return tensor.transpose(0, 1)[None]


_WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, PackedSeqParams, float, bool], Tensor]] = {
    "varlen": _varlen,
    "flex": _flex,
    "documents": _documents,
    "mask": _masked,
}
