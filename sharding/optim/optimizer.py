"""Optimizers over flat shards: an elementwise torch optimizer keeps its class, groups, options and
state, and has two faces.

                  outside `step`                  inside
    param_groups  the model's own parameters      flat 1-D parameters, one per unit and stretch of
                                                  tensors that share a group (on a CPU, a long
                                                  stretch is cut into several)
    state         of these, made when looked at   of the flat ones

What people do to groups and state between two steps, such as adding a group, loading a state dict
or resetting a counter, counts from the next step on: flat parameters are cut anew where it asks for
that.
"""

from __future__ import annotations

import collections
import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from ..errors import NonFiniteGradientError
from ..modules.uncompiled import uncompiled
from ..optimizer_view import FlatRun
from ..runtime import Runtime
from ..tensor.torch_state_dict import teach_torch
from ..unit import Unit
from . import replaced_params
from .compute_shards import lend_copies, take_copies_back
from .flat_runs import (
    Located,
    Location,
    RunKey,
    locate_params,
    recut,
    replaced_owners,
    sharded_locations,
)
from .nonfinite import FiniteSteps
from .state import (
    ShardedState,
    flat_state,
    is_shown,
    scalar_signature,
    shown_state,
    take_own_parts,
)


def adopt(optimizer: torch.optim.Optimizer, runtime: Runtime, located: Located) -> None:
    """Bind an optimizer over parameters from before `fully_shard`, which are at `located`: its
    groups and state are of the sharded ones from now on.
    """
    state: collections.defaultdict[Tensor, Any] = collections.defaultdict(dict)
    for group, places in zip(optimizer.param_groups, located, strict=True):
        params = []
        for param, place in zip(group["params"], places, strict=True):
            shown = param if place is None else runtime.units[place.unit].faces.sharded[place.index]
            params.append(shown)
            if param in optimizer.state:
                state[shown] = optimizer.state[param]
        group["params"] = params
    optimizer.state = state
    bind(optimizer, runtime)


def bind(optimizer: torch.optim.Optimizer, runtime: Runtime) -> None:
    """Let `optimizer`, whose groups hold sharded parameters of `runtime`, step over flat ones.

    Raises:
        ValueError: another optimizer, still alive, updates some of these parameters and others
            besides; state that cannot be cut.
    """
    watch_all_steps()
    bound = _BoundOptimizer(optimizer, runtime)
    bound.cut()
    bound.hook(optimizer)
    _BOUND[optimizer] = bound


def is_bound(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `bind` was called for it."""
    return optimizer in _BOUND


def _guarded(optimizer: torch.optim.Optimizer, bound: _BoundOptimizer) -> Callable[..., Any]:
    """`optimizer.step`, as `bound` tells its ends; refers to `optimizer` weakly."""
    inner, reference = vars(optimizer).get("step"), weakref.ref(optimizer)

    def run(*args: Any, **kwargs: Any) -> Any:
        current = reference()
        assert current is not None
        bound.begin_step()
        try:
            if inner is not None:  # such as an LR scheduler's, which counts steps
                return inner(*args, **kwargs)
            return type(current).step(current, *args, **kwargs)
        except NonFiniteGradientError as error:
            if not bound.leaves_out(error):
                raise
            return bound.loss
        finally:
            bound.end_step()

    @functools.wraps(inner or type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def unbound(_optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)  # not by `step`, which refers to this

    del step.__wrapped__
    step.__signature__ = inspect.signature(optimizer.step)  # type: ignore[attr-defined]
    step.__func__ = unbound  # type: ignore[attr-defined] # what a later LR scheduler wraps
    return step


class _BoundOptimizer:
    """The two faces of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, runtime: Runtime) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._runtime = weakref.ref(runtime)
        self._flat: list[list[Tensor]] = []
        self._flat_state: dict[Any, dict[str, Any]] = {}
        self._shown: list[list[Tensor]] = []
        self._shown_state: object = None
        self._inside = False
        self._lent: list[Unit] = []  # their copies, during a step
        self._is_replaced = False
        # Unless `optimizer.step` was called: `type(optimizer).step(optimizer)` passes it by.
        self._ends_by_itself = True
        self._finite = FiniteSteps(runtime.options.nonfinite_grads)

    def hook(self, optimizer: torch.optim.Optimizer) -> None:
        """Take part in the steps of `optimizer` from now on."""
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._after = optimizer.register_step_post_hook(lambda *_: self._after_step())
        optimizer.register_state_dict_pre_hook(teach_torch)
        optimizer.register_load_state_dict_pre_hook(take_own_parts)
        optimizer.step = _guarded(optimizer, self)  # type: ignore[method-assign]
        # Over flat parameters it is a store for each of them, and there are few.
        optimizer.zero_grad = functools.wraps(type(optimizer).zero_grad)(  # type: ignore[method-assign]
            functools.partial(self._zero_grad)
        )

    def lose(self) -> None:
        """Another optimizer updates these parameters from now on."""
        if not self._is_replaced:
            self._is_replaced = True
            if isinstance(self._shown_state, ShardedState):
                self._shown_state.fill()

    # ---- the step

    def leaves_out(self, error: NonFiniteGradientError) -> bool:
        """Whether the step that ended with `error` is as if it had not been called."""
        return self._finite.leaves_out(error, self._runtime(), list(self._runs()))

    @property
    def loss(self) -> object:
        """What the closure of the step that is under way returned last."""
        return self._finite.loss

    def begin_step(self) -> None:
        """A step begins, whose end will be told."""
        self._ends_by_itself = False

    def end_step(self) -> None:
        """A step is over, whatever ended it."""
        self._ends_by_itself = True
        self._leave()
        self._finite.end()

    def _after_step(self) -> None:
        """The step of a class is over, be it the optimizer's or a base's that it has called."""
        self._leave()
        if self._ends_by_itself:
            self._finite.end()

    def come_last(self, optimizer: torch.optim.Optimizer) -> None:
        """What else is hooked to a step sees the model's own parameters."""
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        before.move_to_end(self._before.id)  # type: ignore[attr-defined]
        after.move_to_end(self._after.id, last=False)  # type: ignore[attr-defined]
        self._leave()  # a subclass calls the step of its base: hooks run again

    @uncompiled
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._enter()
        elif "closure" in kwargs:
            kwargs = {**kwargs, "closure": self._outside(closure)}
        else:
            args = (args[0], self._outside(closure), *args[2:])
        return args, kwargs

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure`, which runs backward and may clip, with the optimizer as it is outside."""

        @functools.wraps(closure)
        def run() -> Any:
            self._leave()
            result = closure()
            self._finite.gradients_changed(result)
            self._enter()
            return result

        return run

    def _enter(self) -> None:
        """Show the flat parameters; raises, before anything changes, what they cannot be for, and
        what `FiniteSteps.check` does.
        """
        optimizer, runtime = self._optimizer(), self._runtime()
        if self._inside or optimizer is None or runtime is None:
            return
        if self._is_replaced:
            raise RuntimeError(
                "optimizer.step: expected the optimizer that was bound last, got one whose "
                "parameters fully_shard_optimizer has given to another; step that one"
            )
        runtime.before_optimizer_step()
        if self._was_changed(optimizer):
            self.cut()
        self._finite.check(optimizer, runtime, list(self._runs()))
        self._show(optimizer, self._flat)
        optimizer.state = self._flat_state  # type: ignore[assignment]
        self._lent = lend_copies(optimizer, self._runs())
        self._inside = True

    @uncompiled
    def _leave(self) -> None:
        """Show the model's parameters again."""
        optimizer, runtime = self._optimizer(), self._runtime()
        if not self._inside or optimizer is None:
            return
        self._inside = False
        self._show(optimizer, self._shown)
        self._flat_state = optimizer.state
        self._show_state(optimizer)
        if runtime is not None:
            # Through `.data` an optimizer can change parameters without a trace in their versions.
            runtime.mark_stale()
        take_copies_back(optimizer, self._lent)
        self._lent = []

    @staticmethod
    def _show(optimizer: torch.optim.Optimizer, params: list[list[Tensor]]) -> None:
        for group, members in zip(optimizer.param_groups, params, strict=True):
            group["params"] = list(members)  # people change these lists in place

    def _show_state(self, optimizer: torch.optim.Optimizer) -> None:
        reference = weakref.ref(self)

        def make() -> dict[Any, dict[str, Any]]:
            bound = reference()
            return {} if bound is None else bound._make_state()

        self._shown_state = optimizer.state = ShardedState(make)

    def _make_state(self) -> dict[Any, dict[str, Any]]:
        state = dict(self._flat_state)
        for unit, run in self._runs():
            if flat := state.pop(run.param, None):
                for index in run.indices:
                    state[unit.faces.sharded[index]] = shown_state(unit, run, flat, index)
        return state

    @uncompiled
    def _zero_grad(self, set_to_none: bool = True) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        self._leave()
        if self._runtime() is not None and self._params_changed(optimizer):
            self.cut()
        self._show(optimizer, self._flat)
        try:
            type(optimizer).zero_grad(optimizer, set_to_none)
        finally:
            self._show(optimizer, self._shown)

    # ---- what the faces have in common

    def _runs(self) -> Iterator[tuple[Unit, FlatRun]]:
        runtime = self._runtime()
        for unit in runtime.units if runtime is not None else ():
            for run in unit.gradients.runs:
                if run.owner is not None and run.owner() is self._optimizer():
                    yield unit, run

    def _params_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        return len(groups) != len(self._shown) or not all(
            len(group["params"]) == len(shown) and all(map(operator.is_, group["params"], shown))
            for group, shown in zip(groups, self._shown, strict=True)
        )

    def _was_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._params_changed(optimizer) or optimizer.state is not self._shown_state:
            return True
        assert isinstance(self._shown_state, ShardedState)
        return self._shown_state.was_looked_at

    def cut(self) -> None:
        """Cut flat parameters as groups and state of the optimizer ask; raises as `bind` does."""
        optimizer, runtime = self._optimizer(), self._runtime()
        assert optimizer is not None and runtime is not None
        names = [name for unit in runtime.units for name in unit.spec.names]
        located = locate_params(optimizer, sharded_locations(runtime), names)
        others = replaced_owners(optimizer, runtime, located)
        named = optimizer.state
        keys: dict[Location, RunKey] = {}
        for number, (group, places) in enumerate(zip(optimizer.param_groups, located, strict=True)):
            for param, place in zip(group["params"], places, strict=True):
                if place is not None:
                    name = runtime.units[place.unit].spec.names[place.index]
                    signature = scalar_signature(named.get(param, {}), param, name)
                    keys[place] = RunKey(number, signature)
        for other in others:
            _BOUND[other].lose()
        flat_params = [
            [p for p, place in zip(group["params"], places, strict=True) if place is None]
            for group, places in zip(optimizer.param_groups, located, strict=True)
        ]
        stepped = {id(runtime.units[key.unit].faces.sharded[key.index]) for key in keys}
        flat: dict[Any, dict[str, Any]] = collections.defaultdict(dict)
        # What is in no group keeps its state, as in plain PyTorch: it may come back.
        flat.update({key: value for key, value in named.items() if id(key) not in stepped})
        for position, unit in enumerate(runtime.units):
            for run in recut(unit, position, keys, optimizer):
                flat_params[keys[Location(position, run.indices[0])].group].append(run.param)
                states = [named.get(unit.faces.sharded[index], {}) for index in run.indices]
                old = self._flat_state.get(run.param, {})
                if any(states):
                    kept = is_shown(unit, run, old, states)
                    flat[run.param] = old if kept else flat_state(unit, run, states)
        self._flat, self._flat_state = flat_params, flat
        self._shown = [list(group["params"]) for group in optimizer.param_groups]
        self._show_state(optimizer)


_BOUND: weakref.WeakKeyDictionary[torch.optim.Optimizer, _BoundOptimizer] = (
    weakref.WeakKeyDictionary()
)


@functools.cache
def watch_all_steps() -> None:
    """See every optimizer's steps, from the first sharded model on."""
    torch_optimizer.register_optimizer_step_pre_hook(_before_any_step)


@uncompiled
def _before_any_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Runs before the hooks of `optimizer` itself."""
    bound = _BOUND.get(optimizer)
    if bound is not None:
        bound.come_last(optimizer)
    else:
        replaced_params.refuse(optimizer)
