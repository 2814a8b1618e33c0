"""GPU memory that NCCL may use where it lies: a pool of its own allocator, registered with groups.

    pool = nccl_mem_pool(group, other)     an empty pool; nothing is registered yet
    with pool:                             what is allocated here comes from the pool
        buffer = torch.empty(...)          at the end, a registration with each group, in order
    pool.close()                           none is left; before destroy_process_group

A pool belongs to whoever made it, and there may be several. torch has all that it takes since 2.11:
nothing is compiled, no environment variable is set.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from .arguments import kind_of, require_flag


def nccl_mem_pool(*groups: dist.ProcessGroup, symm: bool = False) -> NcclMemPool:
    """An empty pool for collectives of `groups`, on the current GPU.

    symm: register symmetric windows, which NCCL's kernels of fewer SMs need (NCCL 2.27). All ranks
    of a group allocate the same sizes in the same order then, and enter and close together.

    Raises:
        TypeError: no process group, or one without this rank; a `symm` that is no bool.
        RuntimeError: there is no GPU, or a group's NCCL has no allocator.
        ValueError: no group, or one that does not communicate by NCCL.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "nccl_mem_pool: expected a GPU, got none that torch sees, and NCCL registers a GPU's "
            "memory alone; leave it out on a CPU, where tensors need no pool"
        )
    if not groups:
        raise ValueError(
            "nccl_mem_pool: expected the process groups whose collectives use its memory, got "
            "none; pass at least one"
        )
    require_flag("symm", symm)
    device = torch.device("cuda", torch.cuda.current_device())
    # Names of one communicator, such as dp and dp_cp without cp, register it once.
    backends = {id(backend): backend for backend in (_nccl_of(group, device) for group in groups)}
    return NcclMemPool([*backends.values()], symm=symm, device=device)


class NcclMemPool:
    """See `nccl_mem_pool`. A block may follow another: registrations end when it begins, and new
    ones cover what both have allocated. After an exception in it there are none, which is slower
    and not wrong.

    Its memory lives as long as the tensors in it.
    """

    def __init__(self, backends: list[Any], *, symm: bool, device: torch.device) -> None:
        """backends: of NCCL, on `device`."""
        self.pool = torch.cuda.MemPool(backends[0].mem_allocator)
        self._backends = backends
        self._symm = symm
        self._device = device
        self._registrations = contextlib.ExitStack()
        self._block: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> NcclMemPool:
        """Allocate from the pool, in this thread.

        Raises:
            RuntimeError: the block has begun already.
        """
        if self._block is not None:
            raise RuntimeError(
                "nccl_mem_pool: expected one block at a time, got another one inside it; leave the "
                "first, or make a pool of its own"
            )
        self.close()
        block = torch.cuda.use_mem_pool(self.pool, device=self._device)
        block.__enter__()
        self._block = block
        return self

    def __exit__(self, *raised: Any) -> None:
        """Allocate as before; register, unless the block raised.

        Raises:
            RuntimeError: a group took no registration; none is left.
        """
        block, self._block = self._block, None
        assert block is not None, "entered"
        block.__exit__(*raised)
        if raised[0] is not None:
            return
        options = {"symm": True} if self._symm else {}
        try:
            for backend in self._backends:
                # First: torch notes a pool before it registers what is in it.
                self._registrations.callback(backend.deregister_mem_pool, self.pool)
                backend.register_mem_pool(self.pool, **options)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                self.close()
            if not isinstance(error, (RuntimeError, TypeError)):
                raise
            raise RuntimeError(
                f"nccl_mem_pool: expected NCCL to register the pool with {type(backend).__name__}, "
                f"got {type(error).__name__} ({error}); pass device_id to init_process_group, so "
                "that the communicator is there by now, and symm=False where torch or NCCL (2.27) "
                "knows no windows. Nothing is registered"
            ) from error

    def close(self) -> None:
        """End all registrations, the latest first; tensors stay. Once more does nothing.

        Raises:
            RuntimeError: NCCL's, of a group that refused, after all were asked.
        """
        self._registrations.close()


def _nccl_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The NCCL backend of `group`.

    Raises:
        TypeError: it is no process group of this rank.
        ValueError: it has another one.
        RuntimeError: it cannot allocate.
    """
    if not hasattr(group, "_get_backend"):
        raise TypeError(
            f"nccl_mem_pool: expected process groups that this rank is in, got {kind_of(group)}; "
            "pass them one by one, after init_process_group"
        )
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError:  # none for this kind of device
        backend = None
    if not hasattr(backend, "register_mem_pool"):
        raise ValueError(
            "nccl_mem_pool: expected groups that communicate by NCCL, got one of "
            f"{dist.get_backend(group)}, which registers no memory; make it with backend='nccl', "
            "or leave the pool out"
        )
    try:
        _ = backend.mem_allocator
    except RuntimeError as error:
        raise RuntimeError(
            f"nccl_mem_pool: expected an NCCL with an allocator (2.19), got {error}; update it, or "
            "leave the pool out"
        ) from error
    return backend
