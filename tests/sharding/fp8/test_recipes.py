"""Recipes by name: what they say, what is changed in them, what they refuse."""

import dataclasses

import pytest

from sidestream.sharding.fp8 import History, Recipe, recipe_for
from sidestream.sharding.fp8.recipes import RECIPES


def blocks(recipe, role):
    found = getattr(recipe, role)
    return found.form.element.name, found.height, found.width


@pytest.mark.parametrize(
    ("name", "weight", "activation", "gradient", "align_numel"),
    [
        ("delayed", ("e4m3", 1, None), ("e4m3", 1, None), ("e5m2", 1, None), 16),
        ("tensorwise", ("e4m3", 1, None), ("e4m3", 1, None), ("e5m2", 1, None), 16),
        ("blockwise", ("e4m3", 128, 128), ("e4m3", 1, 128), ("e4m3", 1, 128), 128),
        ("mxfp8", ("e4m3", 1, 32), ("e4m3", 1, 32), ("e4m3", 1, 32), 32),
        ("nvfp4", ("e2m1", 1, 16), ("e2m1", 1, 16), ("e2m1", 1, 16), 128),
    ],
    ids=list(RECIPES),
)
def test_blocks_by_role(name, weight, activation, gradient, align_numel):
    recipe = recipe_for(name)
    assert blocks(recipe, "weight") == weight
    assert blocks(recipe, "activation") == activation
    assert blocks(recipe, "gradient") == gradient
    assert recipe.align_numel == align_numel
    assert (recipe.history is not None) == (name == "delayed")
    assert recipe == recipe_for(name)


def test_changes():
    tensorwise, blockwise = recipe_for("tensorwise"), recipe_for("blockwise")
    found = recipe_for("tensorwise", gradient=tensorwise.weight)
    assert blocks(found, "gradient")[0] == "e4m3" and blocks(tensorwise, "gradient")[0] == "e5m2"
    assert tensorwise.weight.rule is False and blockwise.weight.rule is True
    assert dataclasses.replace(blockwise.weight, rule=False).rule is False
    history = recipe_for("delayed", history=History(length=4, algorithm="most_recent", margin=2))
    assert history.history == History(length=4, algorithm="most_recent", margin=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe_for("mxfp8").align_numel = 16


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: recipe_for("fp8"),
            ValueError,
            "name: expected one of delayed, tensorwise, blockwise, mxfp8, nvfp4, got 'fp8'",
        ),
        (lambda: recipe_for("mxfp8", margin=1), TypeError, "unexpected keyword argument 'margin'"),
        (lambda: recipe_for("mxfp8", align_numel=0), ValueError, "align_numel: expected 1 or more"),
        (lambda: History(margin=-1), ValueError, "margin: expected 0 to 100, got -1"),
        (lambda: History(length=0), ValueError, "length: expected 1 to 16384"),
        (lambda: History(algorithm="mean"), ValueError, "algorithm: expected one of max, most_re"),
        (
            lambda: dataclasses.replace(recipe_for("tensorwise").weight, rule="yes"),
            ValueError,
            "rule: expected a bool for fp8_tensor_e4m3, got 'yes'",
        ),
        (
            lambda: dataclasses.replace(recipe_for("nvfp4").weight, rule=True),
            ValueError,
            "rule: expected a NoneType for nvfp4, got True",
        ),
        (
            lambda: dataclasses.replace(recipe_for("nvfp4").weight, width=0),
            ValueError,
            "width: expected 1 or more, got 0",
        ),
    ],
    ids=["name", "field", "multiple", "margin", "length", "algorithm", "rule", "nvfp4", "width"],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_recipe_of_ones_own():
    tiles, strips = (recipe_for(name).weight for name in ("blockwise", "mxfp8"))
    own = Recipe("own", tiles, strips, strips, 128)
    assert own.history is None
    delayed = recipe_for("delayed")
    for weight, activation, words in (
        (tiles, tiles, "history: expected none beside weights in blocks of 128 x 128"),
        (delayed.weight, strips, "history: expected none beside activations in blocks of 1 x 32"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(delayed, weight=weight, activation=activation)
    with pytest.raises(TypeError, match="weight: expected Blocks, got Recipe"):
        dataclasses.replace(delayed, weight=delayed)
    with pytest.raises(TypeError, match="history: expected a History or None, got int"):
        dataclasses.replace(delayed, history=4)
