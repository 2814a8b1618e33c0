"""Which wire each parameter's gradient and values get: names, rules, and what is refused.

the first of policy.wire_rules that matches      its wires, both of them
a vector, where a format with scales is asked    `Wire.for_vectors`; values in the compute dtype
all others                                       the policy's
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..kernels import ALIGN_NUMEL
from .arguments import kind_of
from .message_wire import FORMATS, MessageWire, require_format
from .messages import listed
from .wire import PlainWire, Wire

if TYPE_CHECKING:
    from .precision import MixedPrecisionPolicy

PLAIN_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GRAD_WIRES = tuple(FORMATS)
PARAM_WIRES = tuple(name for name in FORMATS if name != "mxfp4")
"""Of weights to nearest, a block of 32 whose largest magnitude alone says the scale loses too much:
"nvfp4" is the format of 4 bits for them.
"""
_MATRIX_DIMS = 2


@dataclass(frozen=True, slots=True)
class WireRule:
    """How the parameters that `where` matches travel, in place of what the policy says.

    Args:
        where: a module class, for all parameters inside its instances; or a function of a
            parameter's name and the parameter that says whether it is one, on all ranks alike.
        grad_wire, param_wire: as those of `MixedPrecisionPolicy`, for vectors too. None: as without
            one there, that is, in `grad_comm_dtype` and in the compute dtype.

    Raises:
        TypeError, ValueError: something else.
    """

    where: type[nn.Module] | Callable[[str, Tensor], bool]
    grad_wire: Wire | str | None = None
    param_wire: str | None = None

    def __post_init__(self) -> None:
        is_class = isinstance(self.where, type) and issubclass(self.where, nn.Module)
        # A module can be called as well, but says nothing of parameters.
        is_function = callable(self.where) and not isinstance(self.where, (type, nn.Module))
        if not is_class and not is_function:
            raise TypeError(
                "WireRule: where: expected a module class or a function of a parameter's name and "
                f"the parameter, got {kind_of(self.where)}; pass one of them, for a single module "
                "a function of the name"
            )
        wire = resolve_grad_wire("WireRule: grad_wire", self.grad_wire)
        object.__setattr__(self, "grad_wire", wire)
        require_param_wire("WireRule: param_wire", self.param_wire)

    def __repr__(self) -> str:
        """The same on all ranks."""
        name = getattr(self.where, "__qualname__", type(self.where).__qualname__)
        return f"WireRule({name}, grad_wire={self.grad_wire!r}, param_wire={self.param_wire!r})"


@dataclass(frozen=True, slots=True)
class ParamWires:
    """How one parameter travels; None: in the dtypes that the policy says."""

    grad: Wire | None = None
    param: str | None = None

    @property
    def names(self) -> tuple[str | None, str | None]:
        """What tells them from others."""
        return None if self.grad is None else self.grad.name, self.param

    @property
    def described(self) -> str:
        """In words, after a dtype; nothing where nothing was chosen."""
        texts = ("gradients in", "gathered in")
        found = [
            f"{text} {name}"
            for text, name in zip(texts, self.names, strict=True)
            if name is not None
        ]
        return f" ({', '.join(found)})" if found else ""


def choose_wires(
    module: nn.Module, params: Sequence[tuple[str, Tensor]], policy: MixedPrecisionPolicy
) -> list[ParamWires]:
    """The wires of `params`, which are those of `module` with their names.

    Raises:
        ValueError: a rule that matches none of them.
    """
    matches = [_matches(rule, module, params) for rule in policy.wire_rules]
    found = []
    for _, param in params:
        rules = [r for r, m in zip(policy.wire_rules, matches, strict=True) if id(param) in m]
        found.append(_wires_of(param, rules, policy))
    for rule, matched in zip(policy.wire_rules, matches, strict=True):
        if not matched:
            names = listed([name for name, _ in params])
            raise ValueError(
                "MixedPrecisionPolicy.wire_rules: expected rules that match a parameter, got "
                f"{rule!r}, which matches none of {names}; correct it or leave it out"
            )
    return found


def _matches(rule: WireRule, module: nn.Module, params: Iterable[tuple[str, Tensor]]) -> set[int]:
    if isinstance(rule.where, type):
        inside = [part for part in module.modules() if isinstance(part, rule.where)]
        held = {id(param) for part in inside for param in part.parameters()}
        return held & {id(param) for _, param in params}
    return {id(param) for name, param in params if rule.where(name, param)}


def _wires_of(param: Tensor, rules: Sequence[WireRule], policy: MixedPrecisionPolicy) -> ParamWires:
    if rules:
        return ParamWires(rules[0].grad_wire, rules[0].param_wire)  # type: ignore[arg-type]
    grad, values = policy.grad_wire, policy.param_wire
    assert not isinstance(grad, str), "the policy has resolved it"
    if param.dim() >= _MATRIX_DIMS:
        return ParamWires(grad, values)
    has_scales = values is not None and values not in PLAIN_DTYPES
    return ParamWires(None if grad is None else grad.for_vectors, None if has_scales else values)


def resolve_grad_wire(option: str, wire: object) -> Wire | None:
    """The wire that a name stands for; raises as `require_wire` does, and for an unknown name."""
    if isinstance(wire, str):
        name = require_format(option, wire, GRAD_WIRES)
        return PlainWire(PLAIN_DTYPES[name]) if name in PLAIN_DTYPES else MessageWire(name)
    if wire is not None:
        require_wire(option, wire)
    return wire  # type: ignore[return-value]


def require_param_wire(option: str, wire: object) -> None:
    """Refuse what is no name of a format that weights may travel in; raises `ValueError`."""
    if wire is not None:
        require_format(option, wire, PARAM_WIRES)


_METHODS = ("part_numel", "pack", "reduce")
_SAMPLES = (128, 1280, 131072)


def require_wire(option: str, wire: object) -> None:
    """Refuse what is no wire, or lacks something that one needs.

    Raises:
        TypeError: it does, or what it has is of another type; named.
        ValueError: it sends nothing for a part.
    """
    if not isinstance(wire, Wire):
        raise TypeError(
            f"{option}: expected None, a name such as 'bf16' or a sidestream.Wire, got "
            f"{kind_of(wire)}; pass one of {', '.join(GRAD_WIRES)}, or an object of a class "
            "derived from sidestream.Wire"
        )
    missing = [name for name in _METHODS if getattr(type(wire), name) is getattr(Wire, name)]
    missing += [name for name in ("name", "dtype") if not hasattr(wire, name)]
    if missing:
        raise TypeError(
            f"{option}: expected a wire with {', '.join([*_METHODS, 'name', 'dtype'])}, got one of "
            f"class {type(wire).__name__} without {', '.join(missing)}; add what is missing"
        )
    kinds: dict[str, type] = {"name": str, "dtype": torch.dtype}
    for attribute, kind in kinds.items():
        found = getattr(wire, attribute)
        if not isinstance(found, kind):
            raise TypeError(
                f"{option}: expected a wire whose {attribute} is a {kind.__name__}, got {found!r} "
                f"of class {type(wire).__name__}; set it to one"
            )
    align = wire.align_numel
    if not isinstance(align, int) or align < 1 or align % ALIGN_NUMEL:
        raise ValueError(
            f"{option}: expected an align_numel that is a multiple of {ALIGN_NUMEL}, got {align!r} "
            f"of class {type(wire).__name__}; return what tensors' places are to be multiples of"
        )
    for numel, sent in _sample(wire).items():
        if not isinstance(sent, int) or sent < 1:
            kind_of_error = ValueError if isinstance(sent, int) else TypeError
            raise kind_of_error(
                f"{option}: expected part_numel({numel}) of class {type(wire).__name__} to be a "
                f"whole number of at least 1, got {sent!r}; return how many elements of "
                f"{wire.dtype} are sent for a part of {numel}"
            )


def bytes_on(wire: Wire) -> str:
    """What ranks must agree on so that messages fit, whatever the wire is called."""
    sizes = [f"{sent} for {numel}" for numel, sent in _sample(wire).items()]
    places = f"places in multiples of {wire.align_numel}"
    return f"{wire.name} of {wire.dtype}, {places}, elements for a part: {', '.join(sizes)}"


def _sample(wire: Wire) -> dict[int, object]:
    return {numel: wire.part_numel(numel) for numel in _SAMPLES}
