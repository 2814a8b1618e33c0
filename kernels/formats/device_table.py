"""The rows of the table of formats as kernels take them: one compile-time constant each.

A kernel has an argument `CODEC: tl.constexpr` or `ELEMENT: tl.constexpr`, and inside it what these
objects have: `CODEC.block_numel` is a number, `CODEC.scaled(...)` a call of a JIT function.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from ..portable import INTERPRETED
from .table import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    ElementFormat,
    MessageFormat,
    ScaleRule,
    WireFormat,
    named,
)

_TRITON_DTYPES: dict[ElementFormat | WireFormat, tl.dtype] = {
    FP32: tl.float32,
    BF16: tl.bfloat16,
    FP16: tl.float16,
    E4M3: tl.float8e4nv,
    E5M2: tl.float8e5,
}
"""What Triton itself converts: these rows alone, since another one may bear the same dtype."""


class Constant:
    """What a kernel may be compiled for.

    Triton's caches know it by `cache_key` and by its text, which tell all of it that compiled code
    depends on: its numbers and the sources of its JIT functions. Objects are compared by identity,
    since a launch hashes them; `element_of` and `codec_of` make one for each.
    """

    @functools.cached_property
    def cache_key(self) -> str:
        """A hash of all fields, of a JIT function's source and whatever that calls."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = [getattr(self, field.name) for field in fields]
        parts = [getattr(value, "cache_key", None) or repr(value) for value in values]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __deepcopy__(self, memo: dict[int, Any]) -> Constant:
        """Itself: Triton keeps copies of globals, to see whether one is another object by now."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}_{self.cache_key}"


@dataclass(frozen=True)
class Conversions:
    """The JIT functions of an element format, in which ELEMENT is the `Element`.

    encode(x, ELEMENT, HARDWARE), FP32 to codes, to nearest; encode_stochastic(x, bits, ELEMENT),
    `None` where there is none; decode(codes, ELEMENT, HARDWARE), codes to FP32. Where they are
    there, pack(x, bits, HARDWARE) goes from FP32 [n, 8 * m] to words of eight codes, uint32 [n, m],
    at once, and unpack(words, HARDWARE) back.
    """

    encode: Any
    encode_stochastic: Any
    decode: Any
    pack: Any = None
    unpack: Any = None


@dataclass(frozen=True, eq=False, repr=False)
class Element(Constant):
    """An element format: its row, Triton's dtype if it can convert it itself, its JIT functions."""

    form: ElementFormat | WireFormat
    dtype: tl.dtype | None
    encode: Any
    encode_stochastic: Any
    decode: Any
    pack: Any
    unpack: Any


@dataclass(frozen=True, eq=False, repr=False)
class Codec(Constant):
    """A message format with a rule for its scales: JIT functions of `table.Codec`'s contract.

    element: the `element_constant`. block_numel: elements that share a scale, 0 where those of a
    row do, or none; scale: the type of blocks' own scales, as they are stored. has_rows: rows have
    FP32 scales. rule: a JIT function of amax and Element where scales are E8M0, a bool, whether
    they are powers of two, where they are FP32. scaled, factors: `None` without scales.
    """

    element: Any
    block_numel: int = 0
    scale: tl.dtype | None = None
    has_rows: bool = False
    in_halves: bool = False
    rule: Any = None
    scaled: Any = None
    factors: Any = None


@functools.cache
def element_of(form: ElementFormat | WireFormat) -> Element:
    """The one `Element` of a row."""
    conversions = named(*form.device)
    return Element(form, _TRITON_DTYPES.get(form), **vars(conversions))


def element_constant(form: ElementFormat | WireFormat) -> Any:
    """The `Element` as JIT functions see it in a global of their module, or in another constant.

    Triton 3.6 passes on no other object from there; its interpreter does not look into a constexpr.
    """
    element = element_of(form)
    return element if INTERPRETED.value else tl.constexpr(element)


@functools.cache
def codec_of(form: MessageFormat, rule: ScaleRule | bool | None = None) -> Codec:
    """The one `Codec` of a row and what `rule_of` says."""
    if form.codec is None:
        return Codec(element_constant(form.element))
    return Codec(
        element_constant(form.element),
        block_numel=form.block_numel or 0,
        scale=tl.float32 if form.scale_dtype is torch.float32 else tl.uint8,
        has_rows=form.has_rows,
        in_halves=form.codec.in_halves,
        rule=named(*rule.device) if isinstance(rule, ScaleRule) else rule,
        scaled=named(form.codec.device, "scaled"),
        factors=named(form.codec.device, "factors"),
    )
