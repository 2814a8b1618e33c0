"""Recipes by name: what they say, what they refuse, which layers they leave out."""

import dataclasses

import pytest

from sidestream.sharding.fp8 import Recipe, recipe_for
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


def test_options():
    assert blocks(recipe_for("tensorwise", gradient_element="e4m3"), "gradient")[0] == "e4m3"
    assert recipe_for("blockwise").weight.rule is True
    assert recipe_for("blockwise", power_of_2=False).weight.rule is False
    history = recipe_for("delayed", history_length=4, algorithm="most_recent", margin=2).history
    assert (history.length, history.algorithm, history.margin) == (4, "most_recent", 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe_for("mxfp8").align_numel = 16


def test_first_and_last_layers_stay():
    recipe = recipe_for("mxfp8", layers_at_start_in_bf16=1, layers_at_end_in_bf16=2)
    assert [recipe.quantizes_layer(i, 6) for i in range(6)] == [0, 1, 1, 1, 0, 0]
    assert not any(recipe.quantizes_layer(i, 2) for i in range(2))
    with pytest.raises(ValueError, match="layer: expected 0 to 5, got 6"):
        recipe.quantizes_layer(6, 6)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("fp8", {}, ValueError, "expected one of delayed, tensorwise, blockwise, mxfp8, nvfp4"),
        ("mxfp8", {"margin": 1}, TypeError, "options of 'mxfp8', which are none, got margin"),
        ("delayed", {"margin": -1}, ValueError, "margin: expected 0 to 100, got -1"),
        ("delayed", {"history_length": 0}, ValueError, "history_length: expected 1 to 16384"),
        ("delayed", {"algorithm": "mean"}, ValueError, "algorithm: expected one of max, most_re"),
        ("delayed", {"gradient_element": "e2m1"}, ValueError, "gradient_element: expected one of"),
        ("tensorwise", {"power_of_2": "yes"}, TypeError, "power_of_2: expected True or False"),
        ("nvfp4", {"layers_at_start_in_bf16": -1}, ValueError, "layers_at_start_in_bf16: expected"),
        ("nvfp4", {"layers_at_end_in_bf16": 1.5}, TypeError, "layers_at_end_in_bf16: expected an"),
    ],
    ids=str,
)
def test_refusals(name, options, error, words):
    with pytest.raises(error, match=words):
        recipe_for(name, **options)


def test_a_recipe_of_ones_own():
    tiles, strips = (recipe_for(name).weight for name in ("blockwise", "mxfp8"))
    own = Recipe(name="own", weight=tiles, activation=strips, gradient=strips, align_numel=128)
    assert own.quantizes_layer(0, 1)
    delayed = recipe_for("delayed")
    for weight, activation, words in (
        (tiles, tiles, "history: expected none beside weights in blocks of 128 x 128"),
        (delayed.weight, strips, "history: expected none beside activations in blocks of 1 x 32"),
        (delayed.gradient, delayed.weight, "one element of weights and .* got e5m2 and e4m3"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(delayed, weight=weight, activation=activation)
    with pytest.raises(TypeError, match="weight: expected Blocks, got Recipe"):
        dataclasses.replace(delayed, weight=delayed)
    with pytest.raises(TypeError, match="history: expected a History or None, got int"):
        dataclasses.replace(delayed, history=4)
