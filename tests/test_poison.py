"""Tests that memory nobody has written yet shows: NaN in floats, the largest value in integers."""

import pytest
import torch

FACTORIES = {
    "empty": lambda dtype: torch.empty(5, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(5, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((5,), (1,), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(5),
    "new_empty_strided": lambda dtype: torch.zeros(1, dtype=dtype).new_empty_strided((5,), (1,)),
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES.keys())
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str
)
def test_floats_are_nan(factory, dtype) -> None:
    assert factory(dtype).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_integers_are_the_largest(dtype) -> None:
    assert (torch.empty(5, dtype=dtype) == torch.iinfo(dtype).max).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_storage_that_grows_from_nothing_is_nan(dtype) -> None:
    tensor = torch.zeros(8, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(8 * dtype.itemsize)
    assert tensor.isnan().all()


def test_written_memory_survives_growth() -> None:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(16 * 4)
    assert (tensor == 1).all()


def test_gradients_of_an_empty_leaf_still_flow() -> None:
    leaf = torch.empty(3, requires_grad=True)
    assert leaf.is_leaf
    leaf.sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad == 1).all()
