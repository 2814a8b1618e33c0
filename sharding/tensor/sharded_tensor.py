"""A parameter of which this rank holds a part: the global shape outside, a 1-D interval inside.

Ranks cut a tensor in its row-major order, anywhere, also inside a row::

    weight (3, 4) on 2 ranks      rank 0: elements [0, 7)      rank 1: elements [7, 12)
                                  #  #  #  #                   .  .  .  .
                                  #  #  #  .                   .  .  .  #
                                  .  .  .  .                   #  #  #  #

Elementwise operators run on `local` alone (`elementwise.py`), checkpoints store the interval as
boxes (`buffers/boxes.py`), `full_tensor` gathers (`group_parts.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload

from ..arguments import kind_of
from ..modules.uncompiled import uncompiled
from .chunks import CheckpointChunks
from .contributions import Contribution
from .elementwise import dispatch
from .grad_source import GradSource, HoldsSum
from .group_parts import GroupParts, Intervals
from .lent import Lent
from .without_storage import WithoutStorage


class ShardedTensor(WithoutStorage, GroupParts, CheckpointChunks, torch.Tensor):
    """Elements [start, start + local.numel()) of a tensor of `shape`, as a tensor of that shape.

    `local` [interval numel] is a contiguous 1-D view; in-place operators on this tensor write to
    it. `intervals` are the (start, stop) of every rank of `group`, known from the layout alone; two
    are equal or have no element in common, and they need not ascend. With `is_parameter` (by
    default where it requires or could get a gradient) it counts as an `nn.Parameter`. Reading and
    writing `.grad` goes to `grad_source` if there is one; to avoid a reference cycle through the
    owner, pass a `weakref.proxy`.
    """

    name: str = ""  # a value, so that the read-only `Tensor.name` is out of the way
    grad_source: GradSource | None
    _own_grad: ShardedTensor | None
    _is_guarded: bool = False
    shown_by: Callable[[], HoldsSum | None] | None = None
    """Of a gradient: a weak reference to what it is a view of."""
    lent = Lent()  # a unit's parameters have one that it looks at
    is_expert: bool = False
    """Whether ranks outside `group` have another tensor in its place."""
    model_group: dist.ProcessGroup | None = None
    """All ranks of its model, where some of that is an expert's: they decide on steps together."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        shape: Sequence[int],
        start: int = 0,
        *,
        name: str = "",
        group: dist.ProcessGroup | None = None,
        intervals: Intervals | None = None,
        requires_grad: bool = False,
        grad_source: GradSource | None = None,
        is_parameter: bool | None = None,
    ) -> ShardedTensor:
        """Wrap `local`.

        Raises:
            TypeError: `local` is no plain tensor, or `shape` or `start` are no whole numbers.
            ValueError: `local` is not 1-D and contiguous or does not fit in `shape`; `intervals`
                are missing, not one per rank of `group`, or say otherwise for this rank.
        """
        if not isinstance(local, Tensor) or isinstance(local, ShardedTensor):
            raise TypeError(f"local of {name!r}: expected a plain tensor, got {kind_of(local)}")
        if not isinstance(shape, Sequence) or not all(
            isinstance(number, int) and number >= 0 for number in (start, *shape)
        ):
            raise TypeError(
                f"shape and start of {name!r}: expected whole numbers of at least 0, got {shape!r} "
                f"and {start!r}"
            )
        shape = tuple(shape)
        stop = start + local.numel()
        if local.dim() != 1 or not local.is_contiguous():
            raise ValueError(f"local of {name!r}: expected 1-D and contiguous, got {local.shape}")
        if not 0 <= start <= stop <= math.prod(shape):
            raise ValueError(
                f"local of {name!r}: expected elements within shape {shape}, got [{start}, {stop})"
            )
        world_size = dist.get_world_size(group) if group is not None else 1
        if intervals is None and world_size == 1:
            intervals = ((start, stop),)
        rank = dist.get_rank(group) if group is not None else 0
        if intervals is None or len(intervals) != world_size or intervals[rank] != (start, stop):
            raise ValueError(
                f"intervals of {name!r}: expected one (start, stop) for each of {world_size} "
                f"ranks, ({start}, {stop}) for rank {rank}, got {intervals}"
            )
        tensor = cls._make(local.detach(), shape, requires_grad)
        tensor.start, tensor.name, tensor.group = start, name, group
        tensor.intervals = intervals
        tensor.grad_source = grad_source
        if is_parameter is None:
            is_parameter = requires_grad or grad_source is not None
        if is_parameter:
            tensor._is_param = True
        tensor._guard_gradient()
        return tensor

    @property
    def allreduce(self) -> object:
        """The mark of an expert, if it was left on the plain parameter that this was made of.

        Raises:
            AttributeError: there was none.
            RuntimeError: it is to say something else now, when nobody reads it.
        """
        if "allreduce" in vars(self):
            return vars(self)["allreduce"]
        raise AttributeError("allreduce")

    @allreduce.setter
    def allreduce(self, value: object) -> None:
        if bool(value) != bool(getattr(self, "allreduce", True)):
            raise RuntimeError(
                f"allreduce of '{self.name}': expected a mark that was there when the model was "
                f"sharded, which chose the ranks that sum its gradient, got {value!r} later; mark "
                "the parameter first"
            )
        vars(self)["allreduce"] = value

    def _guard_gradient(self) -> None:
        """Refuse what autograd would put into a gradient of its own, beside that of the unit."""
        if self.grad_source is not None and self.requires_grad and not self._is_guarded:
            self._is_guarded = True
            torch.Tensor.register_post_accumulate_grad_hook(self, _refuse_gradient)

    @classmethod
    def _make(cls, local: Tensor, shape: Sequence[int], requires_grad: bool) -> ShardedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        tensor.local, tensor.grad_source, tensor._own_grad = local, None, None
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not all(issubclass(kind, ShardedTensor) for kind in types):
            return NotImplemented
        return dispatch(ShardedTensor, func, args, kwargs or {})

    def with_local(self, local: Tensor) -> ShardedTensor:
        """A tensor of the same layout around `local` [interval numel] of any dtype."""
        tensor = ShardedTensor._make(local, self.shape, False)
        tensor.start, tensor.name, tensor.group = self.start, self.name, self.group
        tensor.intervals, tensor.lent = self.intervals, self.lent
        tensor.is_expert, tensor.model_group = self.is_expert, self.model_group
        return tensor

    def _copy(self) -> ShardedTensor:
        return self.with_local(self.local.clone())

    @property
    def awaits_exchange(self) -> bool:
        """Whether it is a gradient of which this rank alone holds a sum, not to be seen."""
        gradients = None if self.shown_by is None else self.shown_by()
        return gradients is not None and gradients.has_unreduced_sum

    def require_exchanged(self) -> None:
        """Refuse to give values of a gradient that waits.

        Raises:
            RuntimeError: it was accumulated under `no_sync` and not exchanged since.
        """
        if self.awaits_exchange:
            raise RuntimeError(
                f"gradient of {self.describe()}: expected an exchanged one, got one that was "
                "accumulated under no_sync, of which each rank holds its own sum; look at it, "
                "scale or clip it after a backward outside no_sync, or clear it with "
                "set_to_none=True"
            )

    def require_one_value(self, caller: object) -> None:
        """Refuse what would take the same on all ranks for granted.

        Raises:
            RuntimeError: ranks have different experts in this place.
        """
        if self.is_expert:
            raise RuntimeError(
                f"{caller}: expected a tensor with one value on all ranks, got that of an expert, "
                f"{self.describe()}, in whose place other ranks have another; take this rank's "
                "own with full_tensor(), and clip with sidestream.clip_grad_norm_"
            )

    def interval_of(self, full: Tensor) -> Tensor:
        """This rank's elements of the plain tensor `full` [shape], 1-D; a view if `full` allows."""
        return full.detach().reshape(-1)[self.start : self.start + self.local.numel()]

    def describe(self) -> str:
        """The parameter in a few words, for messages."""
        return (
            f"sharded parameter {self.name!r} (this rank holds elements {self.start}.."
            f"{self.start + self.local.numel()} of {self.numel()})"
        )

    def to_local(self) -> Tensor:
        """This rank's elements [interval numel]; writing to it writes to the parameter.

        With gradients enabled, that of a trainable parameter is differentiable: its gradient is
        this rank's contribution to the average over the ranks.

        Raises:
            RuntimeError: gradients are enabled and autograd recorded it, yet it is no parameter.
        """
        self.require_exchanged()
        if self._is_recorded():
            return self._contribution(self.start, self.local.detach)
        self.lent.out = True
        return self.local

    @uncompiled
    def full_tensor(self) -> Tensor:
        """The whole tensor [shape], new and plain, on every rank of the group (a collective).

        With gradients enabled, that of a trainable parameter is differentiable: its gradient is
        this rank's contribution to the average over the ranks.

        Raises:
            CommunicationError: the gather failed, for example because a rank died.
            RuntimeError: gradients are enabled and autograd recorded it, yet it is no parameter.
        """
        self.require_exchanged()
        if self._is_recorded():
            return self._contribution(0, self.gather_full)
        return self.gather_full()

    def _is_recorded(self) -> bool:
        return torch.is_grad_enabled() and self.requires_grad

    def _contribution(self, start: int, value: Callable[[], Tensor]) -> Tensor:
        if self.grad_source is None:
            raise RuntimeError(
                f"{self.describe()}: expected a parameter of a sharded model, or a value without "
                "gradient, got the result of an operator on one rank's part, whose gradient would "
                "be lost; take the whole value first (p.full_tensor().exp(), not "
                "p.exp().full_tensor()), or detach() it"
            )
        try:
            leaf, begin_backward = self.grad_source.graph_leaf(self)
        except ReferenceError:  # the model is gone: nothing can train it
            return value()
        contribution: Tensor = Contribution.apply(leaf, start, value, begin_backward)
        return contribution

    @property
    @uncompiled
    def grad(self) -> ShardedTensor | None:
        """The gradient in this layout: what `grad_source` says, else what was assigned."""
        if self.grad_source is None:
            return self._own_grad
        try:
            return self.grad_source.get_grad(self)
        except ReferenceError:  # the model is gone, and its gradients with it
            return None

    @grad.setter
    @uncompiled
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, ShardedTensor):
            if value.shape != self.shape:
                raise RuntimeError(
                    f"grad of {self.describe()}: expected shape {tuple(self.shape)}, got "
                    f"{tuple(value.shape)}"
                )
            value = self.with_local(self.interval_of(value).clone())
        if value is not None and not self.has_layout_of(value):
            raise RuntimeError(
                f"grad of {self.describe()}: expected its layout on all ranks, got that of "
                f"{value.describe()}"
            )
        if self.grad_source is not None:
            self.grad_source.set_grad(self, value)
        else:
            self._own_grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained: a change counts from its unit's next use on."""
        return bool(super().requires_grad)

    @requires_grad.setter
    @uncompiled
    def requires_grad(self, value: bool) -> None:
        torch.Tensor.requires_grad.__set__(self, value)  # type: ignore[attr-defined]
        self._guard_gradient()
        if self.grad_source is not None:
            with contextlib.suppress(ReferenceError):  # the model is gone: nobody has to know
                self.grad_source.requires_grad_changed()

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:
        """Set `requires_grad`; returns self."""
        self.requires_grad = requires_grad
        return self

    def detach_(self) -> ShardedTensor:
        """Freeze the parameter; returns self."""
        return self.requires_grad_(False)

    def register_hook(self, hook: object) -> NoReturn:
        """Refused: autograd never sees a sharded parameter."""
        raise RuntimeError(self._no_hooks("register_hook"))

    def register_post_accumulate_grad_hook(self, hook: object) -> NoReturn:
        """Refused: autograd never sees a sharded parameter."""
        raise RuntimeError(self._no_hooks("register_post_accumulate_grad_hook"))

    def _no_hooks(self, method: str) -> str:
        return (
            f"{method}: {self.describe()} gets its gradient from its unit's exchange, not from "
            "autograd, so the hook would never be called; change p.grad between backward and "
            "optimizer.step, or use optimizer.register_step_pre_hook"
        )

    @property
    @uncompiled
    def data(self) -> ShardedTensor:
        """The same elements without autograd; editing them in place edits the parameter."""
        return self.with_local(self.local)

    @data.setter
    @uncompiled
    def data(self, value: Tensor) -> None:
        # `local` is a view of a buffer that the unit holds too, so it takes the values instead.
        is_moved = isinstance(value, ShardedTensor) and value.device != self.device
        if value.dtype != self.dtype or is_moved:
            raise RuntimeError(
                f"data of {self.describe()}: expected {self.dtype} on {self.device}, got "
                f"{value.dtype} on {value.device}: convert the model before fully_shard"
            )
        with torch.no_grad():
            self.copy_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        rank = dist.get_rank(self.group) if self.group is not None else 0
        return (
            f"ShardedTensor({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}, requires_grad={self.requires_grad}, elements "
            f"{self.start}..{self.start + self.local.numel()} of {self.numel()} on rank {rank} of "
            f"{len(self.intervals)}, local={self.local})"
        )


def _refuse_gradient(parameter: ShardedTensor) -> NoReturn:
    torch.Tensor.grad.__set__(parameter, None)  # type: ignore[union-attr]
    raise RuntimeError(
        f"backward: {parameter.describe()} was used in the loss as it is, and of its gradient this "
        "rank knows only a part; use p.full_tensor() there instead, as in p.full_tensor().norm()"
    )
