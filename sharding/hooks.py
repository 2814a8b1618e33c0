"""Module and autograd hooks -> runtime events, nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .modules.structures import map_tensors, tensors_in
from .modules.tree_watch import TreeWatch
from .modules.uncompiled import uncompiled
from .runtime import Runtime
from .tensor.torch_state_dict import teach_torch
from .use_order import UnitGroup

_NO_COPY = (
    "a sharded module cannot be copied or pickled, since it holds one rank's part of its "
    "parameters: make a plain one and load full_state_dict(module) into it, or save with "
    "save_checkpoint"
)


@dataclass(eq=False, slots=True)
class Entry:
    """What a call of one module's forward does around it, for calls of its other methods too.

    `input_dtype`: floating inputs are cast to it. `output_dtype`: that of what the root returns.
    """

    group: UnitGroup
    runtime: Runtime
    tree: TreeWatch
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None = None

    @uncompiled
    def pre_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call begins: gather, and cast what it is given."""
        group, runtime = self.group, self.runtime
        if self.tree.changed or group.is_root:
            self.tree.check_before_forward()
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "fully_shard: expected a forward outside torch.func, got one inside a transform "
                "such as grad or vmap, which cannot follow gathers; use autograd"
            )
        if group.is_root:
            runtime.root_pre_forward()
        runtime.pre_forward(group)
        if self.input_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), self.input_dtype)
        if group.has_frozen and torch.is_grad_enabled():
            _watch_inputs(group, (args, kwargs), self.inputs_done)
        return args, kwargs

    @uncompiled
    def post_forward(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The call has ended: release, and wait for the gradient of what it returns."""
        if torch.is_grad_enabled():
            _watch_outputs(output, (args, kwargs), self.pre_backward, self.perhaps_pre_backward)
        self.runtime.post_forward(self.group, output)

    @uncompiled
    def inputs_done(self, _grads: object) -> None:
        """The gradients of the inputs are there."""
        self.runtime.inputs_done(self.group)

    @uncompiled
    def pre_backward(self, _grads: object) -> None:
        """The gradient of an output is there."""
        self.runtime.pre_backward(self.group)

    @uncompiled
    def perhaps_pre_backward(self, _grads: object) -> None:
        """The gradient of an output that is an input is there."""
        self.runtime.pre_backward(self.group, certain=False)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(_NO_COPY)

    def __reduce__(self) -> NoReturn:
        raise TypeError(_NO_COPY)

    def call(self, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`method(*args, **kwargs)`, as if it were the forward of `module`."""
        root_calls, open_calls = self.runtime.root_calls, self.group.open_calls
        try:
            args, kwargs = self.pre_forward(module, args, kwargs)
            output = method(*args, **kwargs)
        except BaseException:
            if self.group.open_calls > open_calls:
                self.runtime.post_forward(self.group, None)
            if self.group.is_root:
                self.runtime.forward_failed(root_calls)
            raise
        self.post_forward(module, args, kwargs, output)
        return output if self.output_dtype is None else cast_floating(output, self.output_dtype)


_ENTRIES: weakref.WeakKeyDictionary[nn.Module, Entry] = weakref.WeakKeyDictionary()


def entry_of(module: nn.Module) -> Entry | None:
    """The entry of a sharded root or of a unit's module; None for any other."""
    return _ENTRIES.get(module)


def install_hooks(module: nn.Module, entry: Entry) -> None:
    """Make `module`'s forward and backward drive the runtime of `entry`."""
    _ENTRIES[module] = entry
    module.register_forward_pre_hook(entry.pre_forward, prepend=True, with_kwargs=True)
    # After an exception too, so that whoever catches it finds the module as it is at rest.
    module.register_forward_hook(entry.post_forward, with_kwargs=True, always_call=True)


def install_root_hooks(
    module: nn.Module, runtime: Runtime, *, output_dtype: torch.dtype | None
) -> None:
    """What only the root has: state dicts see parameters at rest, so does whoever catches what
    ended a call, and the output is cast.
    """

    @uncompiled
    def to_rest(*_: object) -> None:
        runtime.settle()

    for submodule in module.modules():
        submodule.register_state_dict_pre_hook(teach_torch)
        submodule.register_state_dict_pre_hook(to_rest)
    module.register_load_state_dict_pre_hook(to_rest)
    _guard_calls(module, runtime)
    _ENTRIES[module].output_dtype = output_dtype
    if output_dtype is not None:

        @uncompiled
        def cast_output(_module: nn.Module, _args: object, output: Any) -> Any:
            return cast_floating(output, output_dtype)

        module.register_forward_hook(cast_output)


def _guard_calls(module: nn.Module, runtime: Runtime) -> None:
    """Bring `module` to rest after any exception. torch calls hooks after an `Exception` alone, not
    after a KeyboardInterrupt, but every call of a module goes through its `_call_impl`.
    """
    reference = weakref.ref(module)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        root_calls = runtime.root_calls
        called = reference()
        assert called is not None
        try:
            return type(called)._call_impl(called, *args, **kwargs)
        except BaseException:
            runtime.forward_failed(root_calls)
            raise

    module._call_impl = guarded  # type: ignore[method-assign]


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`, the rest untouched."""
    return map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )


def _watch_outputs(
    output: object,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    begins: Callable[[object], None],
    may_begin: Callable[[object], None],
) -> None:
    """Call `begins` before the gradient flows into a node that made an output, and `may_begin` if
    that output is an input, as it came or changed in place.
    """
    args, kwargs = inputs
    if type(output) is Tensor and output._base is None:
        if output.grad_fn is not None:
            given = any([output is value for value in (*args, *kwargs.values())])
            output.grad_fn.register_prehook(may_begin if given else begins)
        return
    given_ids: set[int] = set()
    for tensor in tensors_in(inputs):
        given_ids |= {id(tensor), id(tensor._base)}
    watched: set[object] = set()
    for tensor in tensors_in(output):
        # On the node, not the tensor: an in-place change of the output keeps its node in the graph.
        # A change through a view makes a new node for the view, but keeps the base's.
        sources = [tensor] if tensor._base is None else [tensor, tensor._base]
        for source in sources:
            node = source.grad_fn
            if node is not None and node not in watched:
                watched.add(node)
                node.register_prehook(may_begin if id(source) in given_ids else begins)


def _watch_inputs(group: UnitGroup, inputs: object, done: Callable[[Any], None]) -> None:
    """Call `done` when the gradients of all inputs of this call are there.

    A leaf would keep its hook for good. Beside other inputs it is not needed, since the engine runs
    all that the call recorded before what made them; leaves alone are waited for to the end.
    """
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    if tensors:
        group.open_inputs += 1
    tensors = [tensor for tensor in tensors if tensor.grad_fn is not None]
    if tensors:
        torch.autograd.graph.register_multi_grad_hook(tensors, done, mode="all")
