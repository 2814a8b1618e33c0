"""Which dtype each copy of a parameter or gradient has: compute, main, wire, and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .arguments import kind_of, require_flag
from .wire import NativeWire, PlainWire, Wire
from .wire_choice import PLAIN_DTYPES, ParamWires, WireRule, require_param_wire, resolve_grad_wire

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NONFINITE = ("keep", "raise", "skip")
_NAMES_IN_PYTORCH = {
    "param_dtype": "param_dtype",
    "grad_comm_dtype": "reduce_dtype",
    "output_dtype": "output_dtype",
    "cast_forward_inputs": "cast_forward_inputs",
}
"""How the policies of PyTorch's FSDP name the options that ours has too."""


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of a sharded model. `None` keeps what is there already. Allowed: float32, bfloat16,
    float16.

    Args:
        param_dtype: dtype of the parameters in forward and backward (None: the model's own).
        main_params_dtype: dtype of the copy that the optimizer updates (None: the model's own).
            Parameters that are frozen when the model is sharded get none that is wider than their
            own.
        main_grads_dtype: dtype in which reduced gradients are kept and accumulated (None: the main
            parameters' dtype). The sum over ranks is taken in FP32 whatever this says.
        grad_comm_dtype: dtype of gradients on the wire (None: the dtype autograd made, which is the
            parameters' compute dtype). The FP32 sum runs over these rounded values, in rank order.
        grad_partial_dtype: dtype in which sums over the ranks of one axis travel along the next,
            with HSDP or `ranks_per_node` (None: as gradients travel). They are added in FP32.
        grad_wire: how gradients travel, in place of `grad_comm_dtype`: "fp32", "bf16", "fp16",
            "fp8" (a scale for 1,024 elements), "fp8_1x128", "mxfp8", "mxfp4", "nvfp4"; a
            `MessageWire`, which says more; or a `Wire` of one's own.
        param_wire: how parameters are gathered: "fp32", "bf16", "fp16", "fp8", "fp8_1x128",
            "mxfp8", "nvfp4", rounded to nearest from the main parameters (None: in the compute
            dtype). All ranks and ZeRO levels compute with the same bits.
        wire_rules: other wires for some parameters; the first rule that matches counts. Without
            one, vectors (norms, biases) do not travel in formats with scales: their gradients do in
            bfloat16, their values in the compute dtype.
        output_dtype: dtype of the floating-point tensors that the root returns (None: unchanged).
        cast_forward_inputs: cast the floating-point inputs of every unit's forward to its compute
            dtype when `param_dtype` is given.
        nonfinite_grads: what `optimizer.step` does on all ranks when a gradient of its parameters
            is NaN or infinite after the sum. "keep": steps with it. "raise": raises
            `NonFiniteGradientError`, which names parameters and ranks, before anything changes.
            "skip": leaves the step out: parameters, state and counters stay, the gradients too,
            `skipped_steps` counts it, and a closure's value is returned. The last two read each
            gradient once more, and the host waits for one number over all ranks in each step. A
            step to which a `torch.amp.GradScaler` hands what it has found is its to leave out.

    Raises:
        TypeError: a dtype that is not one of the allowed ones, a flag that is no bool.
        ValueError: an unknown format, or something else to do about gradients.
    """

    param_dtype: torch.dtype | None = None
    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = torch.float32
    grad_comm_dtype: torch.dtype | None = None
    grad_partial_dtype: torch.dtype | None = torch.float32
    grad_wire: Wire | str | None = None
    param_wire: str | None = None
    wire_rules: tuple[WireRule, ...] = ()
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    nonfinite_grads: str = "keep"

    def __post_init__(self) -> None:
        require_flag("MixedPrecisionPolicy.cast_forward_inputs", self.cast_forward_inputs)
        if self.nonfinite_grads not in _NONFINITE:
            raise ValueError(
                "MixedPrecisionPolicy.nonfinite_grads: expected 'keep', 'raise' or 'skip', got "
                f"{self.nonfinite_grads!r}; pass one of them"
            )
        wire = resolve_grad_wire("MixedPrecisionPolicy.grad_wire", self.grad_wire)
        object.__setattr__(self, "grad_wire", wire)
        require_param_wire("MixedPrecisionPolicy.param_wire", self.param_wire)
        if wire is not None and self.grad_comm_dtype is not None:
            raise TypeError(
                "MixedPrecisionPolicy: expected grad_comm_dtype or grad_wire, got both, "
                f"{self.grad_comm_dtype} and {wire!r}; pass the one that is meant"
            )
        object.__setattr__(self, "wire_rules", _checked_rules(self.wire_rules))
        for entry in fields(self):
            value = getattr(self, entry.name)
            is_dtype = entry.name.endswith("_dtype")
            if is_dtype and value is not None and value not in _FLOATS:
                raise TypeError(
                    f"MixedPrecisionPolicy.{entry.name}: expected None, torch.float32, "
                    f"torch.bfloat16 or torch.float16; got {value!r}"
                )


def _checked_rules(rules: object) -> tuple[WireRule, ...]:
    found = (rules,) if isinstance(rules, WireRule) else rules
    if not isinstance(found, (tuple, list)) or not all(isinstance(r, WireRule) for r in found):
        raise TypeError(
            "MixedPrecisionPolicy.wire_rules: expected sidestream.WireRules in a tuple, got "
            f"{rules!r}; write wire_rules=(WireRule(nn.Embedding, grad_wire='bf16'),)"
        )
    return tuple(found)


def require_policy(policy: object) -> None:
    """Refuse what is no policy of ours, and say how to write PyTorch's as one.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return
    options = "param_dtype=torch.bfloat16"
    if not isinstance(policy, type) and hasattr(policy, "reduce_dtype"):
        theirs = {ours: getattr(policy, name, None) for ours, name in _NAMES_IN_PYTORCH.items()}
        options = ", ".join(
            f"{name}={value}" for name, value in theirs.items() if value is not None
        )
    raise TypeError(
        "mixed_precision_policy: expected a sidestream.MixedPrecisionPolicy, got "
        f"{kind_of(policy)} of {getattr(policy, '__module__', 'builtins')}; "
        f"pass sidestream.MixedPrecisionPolicy({options})"
    )


@dataclass(frozen=True, slots=True)
class UnitDtypes:
    """The dtypes of one unit, all decided. `master`: what `main` has to be for training."""

    compute: torch.dtype
    main: torch.dtype
    master: torch.dtype
    grad: torch.dtype


def resolve_dtypes(
    policy: MixedPrecisionPolicy, param_dtype: torch.dtype, *, trainable: bool
) -> UnitDtypes:
    """The dtypes of a unit whose parameters have `param_dtype` in the model as given.

    Frozen ones keep all their bits in it: a wider copy would only take memory.
    """
    compute = policy.param_dtype or param_dtype
    master = policy.main_params_dtype or param_dtype
    is_wider = master.itemsize > param_dtype.itemsize
    return UnitDtypes(
        compute=compute,
        main=param_dtype if is_wider and not trainable else master,
        master=master,
        grad=policy.main_grads_dtype or master,
    )


def resolve_wires(
    policy: MixedPrecisionPolicy, wires: ParamWires, compute: torch.dtype, *, native: bool = False
) -> tuple[Wire, Wire]:
    """How gradients of a unit travel along the first axis, and how sums do along further ones."""
    kind = NativeWire if native else PlainWire
    wire = wires.grad or kind(policy.grad_comm_dtype or compute)
    partial = policy.grad_partial_dtype
    return wire, wire if partial is None else kind(partial)


def resolve_param_wire(wires: ParamWires, compute: torch.dtype) -> str | None:
    """The format in which parameters of a unit are gathered; None: they travel as `compute`."""
    return None if wires.param is None or PLAIN_DTYPES.get(wires.param) == compute else wires.param


def require_masters(dtypes: UnitDtypes, unit: str, trainable: Sequence[str]) -> None:
    """Refuse to train what was frozen, and so has no master weights.

    Raises:
        RuntimeError: `unit` is kept in a narrower dtype, and `trainable`, the names of its
            parameters that are to be trained, are not none.
    """
    if trainable and dtypes.main != dtypes.master:
        raise RuntimeError(
            f"unit '{unit}': expected what was frozen at fully_shard to stay so, since it is kept "
            f"in {dtypes.main}, without the {dtypes.master} copy that training updates, got "
            f"{list(trainable)} unfrozen; freeze them after fully_shard instead of before, or pass "
            "MixedPrecisionPolicy(main_params_dtype=None) to train without that copy"
        )
