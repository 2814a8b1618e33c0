"""The case of `toy_negate_`."""

import torch

from sidestream.kernels.ahead.count import full_path
from sidestream.kernels.case import Case, Gate, Operands
from sidestream.tests.kernels.toy_room.op import negate_


def make(device, numel):
    x = torch.randn(numel, device=device)
    return Operands(read=[x], written=[torch.zeros_like(x)])


def call(operands):
    negate_(operands.written[0], operands.read[0])


CASE = Case(
    op="toy_negate_",
    name="fp32",
    format="fp32",
    dtype="fp32",
    make=make,
    call=call,
    numel=lambda numel: numel,
    num_bytes=lambda numel: 8 * numel,
    gate=Gate(6.0, 40),
    count=full_path,
)
