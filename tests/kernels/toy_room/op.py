"""The op `sidestream::toy_negate_` and the public function: what it accepts."""

import torch

from sidestream.kernels.aliasing import check_apart
from sidestream.kernels.checks import check_like, check_vector
from sidestream.kernels.op import Op, call
from sidestream.tests.kernels.toy_room import reference


def _on_gpu(out: torch.Tensor, x: torch.Tensor) -> None:
    from sidestream.tests.kernels.toy_room import kernel  # importing the op loads no Triton

    kernel.negate_(out, x)


_NEGATE = Op("toy_negate_(Tensor(a!) out, Tensor x) -> ()", reference.negate_, _on_gpu)


def negate_(out: torch.Tensor, x: torch.Tensor) -> None:
    """out = -x: 1-D, FP32, apart. Raises `ValueError` before anything is written."""
    check_vector("x", x)
    check_like("out", out, x.shape, torch.float32, x.device)
    check_apart({"out": out}, {"x": x})
    if x.numel():
        call(_NEGATE, out, out, x)
