"""`Float8Linear`: its definition, its distance from FP32, training, ranks, what a GPU is given."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import sidestream as ss
from sidestream.kernels.formats.swizzle import swizzled_numel
from sidestream.sharding.fp8 import (
    Float8Linear,
    History,
    QuantizedTensor,
    linear,
    quantize,
    quantize_param_shard,
    recipe_for,
    update_scales,
)
from sidestream.sharding.fp8.linear import SCALED_MM, product
from sidestream.sharding.fp8.recipes import RECIPES
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.fp8.kinds import same

KINDS = pytest.mark.parametrize("name", list(RECIPES))


def layer_of(name, in_features=128):
    torch.manual_seed(1)
    return Float8Linear(nn.Linear(in_features, 256), recipe_for(name))


def passed(layer, x, seed=2, **options):
    """(output, gradients of input, weight and bias), and the gradient of the output."""
    x = x.clone().requires_grad_()
    out = layer(x, **options)
    torch.manual_seed(seed)
    grad = torch.randn(out.shape, dtype=out.dtype)
    layer.zero_grad()
    out.backward(grad)
    return (out.detach(), x.grad, layer.weight.grad, layer.bias.grad), grad


def rounded(x, blocks, across=False):
    """What quantising makes of a matrix, or of its transpose."""
    return quantize((x.t() if across else x).detach().contiguous(), blocks).dequantize()


@KINDS
def test_it_is_the_product_of_what_quantising_leaves(name):
    """37 tokens, which no block and no tensor core likes, in two dimensions."""
    layer = layer_of(name)
    recipe = layer.recipe
    x = torch.randn(1, 37, 128)
    (out, x_grad, weight_grad, bias_grad), grad = passed(layer, x)
    rows = torch.cat((x[0], torch.zeros(-37 % recipe.align_numel, 128)))
    grads = torch.cat((grad[0], torch.zeros(-37 % recipe.align_numel, 256)))
    weight = layer.weight
    expected = rounded(rows, recipe.activation) @ rounded(weight, recipe.weight).t()
    torch.testing.assert_close(out[0], expected[:37] + layer.bias, rtol=1e-5, atol=1e-5)
    expected = rounded(grads, recipe.gradient) @ rounded(weight, recipe.weight, across=True).t()
    torch.testing.assert_close(x_grad[0], expected[:37], rtol=1e-5, atol=1e-5)
    across = rounded(grads, recipe.gradient, True), rounded(rows, recipe.activation, True)
    torch.testing.assert_close(weight_grad, across[0] @ across[1].t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bias_grad, grad[0].sum(0))


# Of a value x in a block or tensor with largest magnitude A the error is at most u |x| + v A: half
# a step of 2^-m, and half a subnormal step where A becomes the element's largest value or, with
# scales that are powers of two, half of that. E2M1's u: its scale may be a 16th too small as well.
STEPS = {
    "e4m3": (2.0**-4, 2.0**-10 / 224),
    "e5m2": (2.0**-3, 2.0**-17 / 28672),
    "e2m1": (2.0**-2, 0.25 / 6 * (1 + 2.0**-4)),
}


def error_of(x, blocks):
    relative, absolute = STEPS[blocks.form.element.name]
    return relative * x.abs() + absolute * x.abs().max()


def product_error(a, b, a_blocks, b_blocks):
    """The largest error of each element of a b^T, and a few roundings in FP32."""
    ea, eb = error_of(a, a_blocks), error_of(b, b_blocks)
    a, b = a.abs(), b.abs()
    return ea @ b.t() + a @ eb.t() + ea @ eb.t() + 1e-4 * (a @ b.t())


@KINDS
def test_distance_from_fp32_is_that_of_its_formats(name):
    layer = layer_of(name)
    plain = nn.Linear(128, 256)
    plain.load_state_dict({key: layer.state_dict()[key] for key in ("weight", "bias")})
    x = torch.randn(128, 128)
    found, grad = passed(layer, x)
    expected, _ = passed(plain, x)
    recipe, weight = layer.recipe, layer.weight.detach()
    bounds = (
        product_error(x, weight, recipe.activation, recipe.weight),
        product_error(grad, weight.t(), recipe.gradient, recipe.weight),
        product_error(grad.t(), x.t(), recipe.gradient, recipe.activation),
    )
    for one, other, bound in zip(found[:3], expected[:3], bounds, strict=True):
        error = (one - other).abs()
        assert (error <= bound).all()
        assert error.max() > 0.01 * bound.max()


@KINDS
def test_given_a_quantised_weight(name):
    layer = layer_of(name)
    x = torch.randn(128, 128)
    blocks = layer.recipe.weight
    weight = quantize(layer.weight.detach(), blocks)
    expected, _ = passed(layer_of(name), x)
    found, grad = passed(layer, x, weight=weight)
    assert same(found[0], expected[0])
    assert same(found[2], expected[2])
    across = weight.transposed() if blocks.is_symmetric else None
    across = across or quantize(weight.dequantize().t().contiguous(), blocks)
    rows = rounded(grad, layer.recipe.gradient)
    torch.testing.assert_close(found[1], rows @ across.dequantize().t(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"weight: expected \(256, 128\) in the blocks of"):
        layer(x, QuantizedTensor.empty((128, 256), blocks))


def regress(rank, world_size, name, steps=8):
    """The losses of a small regression whose weights, sharded, are quantised anew each step, and
    their bits at the end.
    """
    recipe = recipe_for(name)
    torch.manual_seed(0)
    target = torch.randn(128, 128) / 11
    plain = (nn.Linear(128, 128, bias=False) for _ in range(2))
    layers = nn.ModuleList(Float8Linear(linear, recipe) for linear in plain)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    group = dist.group.WORLD if world_size > 1 else None
    numel = 128 * 128 // world_size
    losses = []
    for step in range(steps):
        made = [QuantizedTensor.empty((128, 128), recipe.weight) for _ in layers]
        for one in made:
            one.codes.view(torch.uint8).zero_()
            one.scales.view(-1).view(torch.uint8).zero_()
        mains = [layer.weight.detach().view(-1)[rank * numel :][:numel] for layer in layers]
        quantize_param_shard(made, mains, [rank * numel] * 2, group)
        for one in made if group else []:
            for tensor in (one.codes, one.scales):
                dist.all_reduce(tensor.view(-1).view(torch.uint8), dist.ReduceOp.MAX)
        torch.manual_seed(100 * step + rank)
        x = torch.randn(64 // world_size, 128)
        hidden = layers[0](x, made[0]).relu()
        loss = (layers[1](hidden, made[1]) - (x @ target).relu()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if group:
            for param in layers.parameters():
                dist.all_reduce(param.grad)
                param.grad /= world_size
        optimizer.step()
        update_scales(layers, group)
        losses.append(loss.item())
    bits = [tensor.view(-1).view(torch.uint8) for one in made for tensor in (one.codes, one.scales)]
    states = [buffer.reshape(-1) for buffer in layers.buffers()]
    return losses, torch.cat(bits), torch.cat([torch.zeros(1), *states])


@KINDS
def test_a_regression_is_learnt(name):
    losses, _, _ = regress(0, 1, name)
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2]), losses


def ranks_regress(rank, world_size):
    return {name: regress(rank, world_size, name, steps=2) for name in RECIPES}


def test_ranks_have_the_same_quantised_weights_and_scales():
    results = run_on_ranks(ranks_regress, 2)
    for name in RECIPES:
        (losses, bits, states), (others, other_bits, other_states) = (r[name] for r in results)
        assert losses != others
        assert same(bits, other_bits), name
        assert same(states, other_states), name


def test_in_the_place_of_a_layer():
    """Its parameters, hooks, mode and what was set on it stay."""
    plain = nn.Linear(32, 32).eval()
    seen = []
    plain.register_forward_hook(lambda *_: seen.append("called"))
    plain.tag = "mine"
    made = Float8Linear(plain, recipe_for("delayed"))
    assert made.weight is plain.weight and made.bias is plain.bias
    assert dict(made.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert not made.training and made.tag == "mine"
    assert made(torch.randn(2, 32)).isfinite().all() and seen == ["called"]
    assert not any(state.amax_history.any() for state in made.scaling.values())
    assert Float8Linear(made, recipe_for("tensorwise")).weight is plain.weight
    no_bias = Float8Linear(nn.Linear(32, 64, bias=False), recipe_for("mxfp8"))
    assert no_bias.training and no_bias.bias is None and not list(no_bias.buffers())


def test_weights_and_activations_of_other_elements():
    """Each is cast by a state of its own."""
    delayed = recipe_for("delayed")
    recipe = recipe_for("delayed", weight=delayed.gradient, history=History(length=2))
    layer = Float8Linear(nn.Linear(32, 32), recipe)
    x = torch.randn(16, 32)
    for _ in range(2):
        layer(x)
        update_scales(layer)
    for role, tensor, largest in (
        ("weight", layer.weight.detach(), 57344.0),
        ("activation", x, 448.0),
    ):
        assert layer.scaling[role].scales == largest / tensor.abs().max()


@pytest.mark.parametrize(
    ("make", "recipe", "error", "words"),
    [
        (lambda: nn.Linear(16, 16), "delayed", TypeError, "recipe: expected a Recipe, got str"),
        (nn.ReLU, recipe_for("delayed"), TypeError, "linear: expected a Linear, got ReLU"),
        (
            lambda: nn.Linear(33, 32),
            recipe_for("mxfp8"),
            ValueError,
            r"of 32 for mxfp8, got \(33, 32\)",
        ),
        (lambda: nn.Linear(16, 0), recipe_for("delayed"), ValueError, r"got \(16, 0\)"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            recipe_for("delayed"),
            ValueError,
            r"a weight and a bias alone.*, got \['bias', 'parametrizations'\]",
        ),
    ],
    ids=["recipe", "layer", "odd", "empty", "made of others"],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_refusals(make, recipe, error, words):
    linear = make()
    with pytest.raises(error, match=words):
        Float8Linear(linear, recipe)


def test_a_layer_that_calls_something_else_is_refused(monkeypatch):
    patched, compiled = nn.Linear(16, 16), nn.Linear(16, 16)
    patched.forward = patched.forward
    monkeypatch.setattr(torch, "compile", lambda call: call)  # takes seconds to import
    compiled.compile()
    for layer, words in ((patched, "'forward'"), (compiled, "'_compiled_call_impl'")):
        with pytest.raises(ValueError, match=f"a weight and a bias alone, got .*{words}"):
            Float8Linear(layer, recipe_for("delayed"))


@KINDS
def test_no_tokens_and_inputs_narrower_than_the_parameters(name):
    layer = layer_of(name)
    (out, x_grad, weight_grad, bias_grad), _ = passed(layer, torch.randn(3, 0, 128))
    assert (out.shape, x_grad.shape) == ((3, 0, 256), (3, 0, 128))
    assert not weight_grad.any() and not bias_grad.any()
    (out, x_grad, weight_grad, _), _ = passed(layer, torch.randn(3, 128, dtype=torch.bfloat16))
    assert (out.dtype, x_grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert weight_grad.dtype == torch.float32
    with pytest.raises(ValueError, match=r"input: expected torch\.float32, torch\.bf"):
        layer(torch.randn(3, 128).double())


def test_a_gradient_of_a_gradient_is_refused():
    """What would come back lacks the layer's own part of it."""
    layer = layer_of("mxfp8")
    x = torch.randn(4, 128, requires_grad=True)
    [grad] = torch.autograd.grad(layer(x.tanh()).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_operands_of_scaled_mm_on_a_cpu():
    """Which has it for one scale a tensor: the second operand is the transposed one."""
    a = quantize(torch.randn(48, 64), recipe_for("tensorwise").gradient)
    b = quantize(torch.randn(32, 64), recipe_for("tensorwise").weight)
    found = SCALED_MM["tensor"](a, b, torch.float32)
    torch.testing.assert_close(found, product(a, b, torch.float32), rtol=1e-5, atol=1e-5)


class Counting(TorchDispatchMode):
    """How often `torch._scaled_mm` runs."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._scaled_mm.default
        return func(*args, **(kwargs or {}))


def without_memory(scales):
    """What swizzled scales look like."""
    return scales.new_empty(swizzled_numel(*scales.shape))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "blockwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scaled_mm_accepts_the_operands_of_a_gpu(name, dtype, monkeypatch):
    """PyTorch's own checks of layouts, scales and dtypes, on a GPU without memory."""
    recipe = recipe_for(name)
    monkeypatch.setattr(linear, "swizzle_scales", without_memory)
    monkeypatch.setattr(linear, "tensor_factor", lambda of: of.amax)  # ours would be kept
    products = ("activation", "weight"), ("gradient", "weight"), ("gradient", "activation")
    with FakeTensorMode(), Counting() as counting:
        for roles in products:
            a, b = (
                QuantizedTensor.empty((rows, 256), getattr(recipe, role), "cuda")
                for rows, role in zip((160, 384), roles, strict=True)
            )
            out = product(a, b, dtype)
            assert (out.shape, out.dtype, out.device.type) == ((160, 384), dtype, "cuda")
    assert counting.count == len(products)


NEEDS = {"mxfp8": (10, 0), "nvfp4": (10, 0), "blockwise": (8, 9)}


@pytest.mark.gpu
@KINDS
def test_a_gpu_multiplies_what_a_cpu_does(name):
    if torch.cuda.get_device_capability() < NEEDS.get(name, (8, 9)):
        pytest.skip("its tensor cores have no such format")
    x = torch.randn(200, 256)
    layer = layer_of(name, in_features=256)
    (expected, _), there = passed(layer, x), layer_of(name, in_features=256).cuda()
    moved = x.cuda().requires_grad_()
    out = there(moved)
    torch.manual_seed(2)
    out.backward(torch.randn(200, 256).cuda())
    found = out.detach(), moved.grad, there.weight.grad
    # Tensor cores keep 14 bits or more of a sum; MX and NVFP4 results are BF16.
    for one, other in zip(found, expected[:3], strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2.0**-7, atol=2.0**-8 * other.abs().max())


def sharded_losses(rank, world_size):
    """Of delayed scaling in a model that is sharded, at every level."""
    losses = {}
    for zero in (0, 2, 3):
        torch.manual_seed(0)
        recipe = recipe_for("delayed", history=History(length=4))
        sizes = ((16, 32), (32, 16))
        blocks = [
            nn.Sequential(*(Float8Linear(nn.Linear(*size), recipe) for size in sizes))
            for _ in range(2)
        ]
        model = nn.Sequential(*blocks)
        ss.fully_shard_model(model, fsdp_unit_modules=[nn.Sequential], zero_dp_strategy=zero)
        optimizer = ss.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        losses[zero] = []
        with pytest.raises(ValueError, match=r"got a ShardedTensor; quantise .* before"):
            Float8Linear(model[0][0], recipe_for("delayed"))
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(8, 16)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            update_scales(model, dist.group.WORLD)
            losses[zero].append(loss.item())
    return losses, [buffer.clone() for buffer in model.buffers()]


def test_in_a_sharded_model_levels_agree_in_every_bit():
    (losses, states), (_, others) = run_on_ranks(sharded_losses, 2)
    assert losses[0] == losses[2] == losses[3]
    assert all(same(one, other) for one, other in zip(states, others, strict=True))
    assert len(states) == 2 * 3 * 4
