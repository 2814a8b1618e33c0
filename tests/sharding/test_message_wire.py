"""What a message wire makes of gradients, and which parameters travel how."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sidestream as ss
from sidestream.buffers import BufferPool, FlatBuffer, flat_layout
from sidestream.kernels import hadamard16, message_layout, pack_message_, unpack_message_
from sidestream.kernels.launch import recorded
from sidestream.kernels.op import launching_on_cpu
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.message_wire import mixed
from sidestream.sharding.wire import FlatSource, GradientPacker, Places
from sidestream.sharding.wire_choice import GRAD_WIRES, PARAM_WIRES
from sidestream.tests.ranks import run_on_ranks
from sidestream.training.model import Block, GPTConfig, build_model
from sidestream.training.options import GRAD_WIRES as OPTIONS_GRAD_WIRES
from sidestream.training.options import PARAM_WIRES as OPTIONS_PARAM_WIRES

LAYOUT = flat_layout([(40, 50), (7,), (3, 1000)], 2, align_numel=1024)
FIRST = (10_000, 0, 50_000)


def gradients() -> Tensor:
    """A flat buffer of gradients, zero in gaps."""
    flat = torch.zeros(LAYOUT.numel)
    torch.manual_seed(0)
    for view in FlatBuffer(flat, LAYOUT).views():
        view.copy_(torch.randn(view.shape) * torch.rand(view.shape).exp2())
    return flat


def source_of(flat: Tensor, **more: Any) -> FlatSource:
    return FlatSource(flat, Places(LAYOUT, FIRST, (0, LAYOUT.numel)), **more)


def packed(wire: ss.MessageWire, source: FlatSource, parts: int = 2) -> Tensor:
    numel = parts * wire.part_numel(LAYOUT.numel // parts)
    sent = torch.full((numel,), 0xAB, dtype=torch.uint8)
    wire.pack(sent, source, parts)
    return sent


def received(wire: ss.MessageWire, sent: Tensor, parts: int = 2) -> Tensor:
    """What one rank's messages say, all parts of them."""
    out = torch.full((LAYOUT.numel,), float("nan"))
    for row, part in zip(sent.chunk(parts), out.chunk(parts), strict=True):
        wire.reduce(part, [row])
    return out


def test_noise_is_of_the_place_in_the_model_and_the_key() -> None:
    wire, flat = ss.MessageWire("mxfp8", rounding="stochastic", seed=3), gradients()
    sent = packed(wire, source_of(flat, noise_key=5))
    expected = torch.empty_like(sent)
    for number, message in enumerate(expected.chunk(2)):
        part = Places(
            LAYOUT, FIRST, (number * LAYOUT.shard_numel, (number + 1) * LAYOUT.shard_numel)
        )
        tensors, offsets = part.cut(flat.chunk(2)[number])
        noise = {"seed": mixed(3, 5), "first_indices": part.indices_at(offsets)}
        pack_message_(message, tensors, "mxfp8", offsets=offsets, rounding="stochastic", **noise)
    assert torch.equal(sent, expected)
    assert part.indices_at(offsets)[0] > 0 and min(part.indices_at([0])) != 0
    assert not torch.equal(sent, packed(wire, source_of(flat, noise_key=6)))
    other = ss.MessageWire("mxfp8", rounding="stochastic", seed=4)
    assert not torch.equal(sent, packed(other, source_of(flat, noise_key=5)))


class NoHostReads(TorchDispatchMode):
    """Refuses to tell a host what a tensor has."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_seed_has_an_offset_on_the_device() -> None:
    offset, flat = torch.tensor([0]), gradients()
    wire = ss.MessageWire("nvfp4", seed=3, seed_offset=offset)
    source = source_of(flat, noise_key=5)
    sent = packed(wire, source)
    assert torch.equal(sent, packed(ss.MessageWire("nvfp4", seed=3), source))
    for moved in (1, -(2**63)):
        offset.fill_(moved)
        other = packed(wire, source)
        assert not torch.equal(other, sent)
        tensors, offsets = source.present()
        noise = {
            "seed": (mixed(3, 5) + moved) % 2**64,
            "first_indices": source.places.indices_at(offsets),
        }
        expected = torch.empty_like(other)
        pack_message_(
            expected.view(2, -1), tensors, "nvfp4", offsets=offsets, rounding="stochastic", **noise
        )
        assert torch.equal(other, expected)
    with launching_on_cpu(), recorded() as launches, NoHostReads():
        packed(wire, source)
    assert isinstance(launches[-1].arguments["seed"], Tensor)


def test_an_offset_elsewhere_is_refused_by_its_name() -> None:
    wire = ss.MessageWire("nvfp4", seed_offset=torch.zeros(1, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match=r"MessageWire: seed_offset: .* cpu, got meta; move"):
        packed(wire, source_of(gradients(), noise_key=5))


def test_noise_makes_no_error_on_average() -> None:
    wire, flat = ss.MessageWire("nvfp4"), gradients()
    total, runs = torch.zeros_like(flat, dtype=torch.float64), 200
    for key in range(runs):
        total += received(wire, packed(wire, source_of(flat, noise_key=key)))
    nearest = ss.MessageWire("nvfp4", rounding="nearest")
    once = (received(nearest, packed(nearest, source_of(flat))) - flat).abs().max()
    # An element's error is at most a step, twice what rounding to nearest makes; six deviations.
    assert (total / runs - flat).abs().max() <= 6 * 2 * once / runs**0.5
    assert (total / runs - flat).abs().mean() < 0.2 * once


@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_lost_comes_with_the_next_gradients(dtype: torch.dtype, hadamard: bool) -> None:
    """After any number of exchanges all that was lost is the residual."""
    wire = ss.MessageWire("mxfp4", rounding="nearest", error_feedback=dtype, hadamard=hadamard)
    residual = torch.zeros(LAYOUT.numel, dtype=dtype)
    flat = gradients()
    total = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    runs = 8
    for _ in range(runs):
        total += received(wire, packed(wire, source_of(flat, residual=residual)))
    places = Places(LAYOUT, FIRST, (0, LAYOUT.numel))
    shown = total.float()
    places.clear_gaps(shown, wire.align_numel)
    lost = runs * flat - shown - residual.float()
    step = torch.finfo(dtype).eps
    assert lost.abs().max() <= runs * step * (flat.abs().max() + residual.float().abs().max())
    assert residual.abs().max() > 0
    gaps = torch.ones(LAYOUT.numel)
    for view in FlatBuffer(gaps, LAYOUT).views():
        view.zero_()
    assert not residual[gaps.bool()].any()


def test_what_is_not_finite_does_not_stay_in_the_residual() -> None:
    wire = ss.MessageWire("nvfp4", error_feedback=torch.float32)
    residual, flat = torch.zeros(LAYOUT.numel), gradients()
    flat[[3, 900]] = torch.tensor([float("nan"), float("inf")])
    out = received(wire, packed(wire, source_of(flat, residual=residual)))
    assert residual.isfinite().all() and not residual[:16].any()
    bad = torch.zeros(LAYOUT.numel, dtype=torch.bool)
    bad[0:16] = bad[896:912] = True
    assert torch.equal(~out.isfinite(), bad)


def test_the_transform_is_of_what_is_sent() -> None:
    wire, flat = ss.MessageWire("nvfp4", rounding="nearest", hadamard=True), gradients()
    sent = packed(wire, source_of(flat))
    expected = torch.empty_like(sent)
    pack_message_(expected.view(2, -1), [hadamard16(flat)], "nvfp4", offsets=[0])
    assert torch.equal(sent, expected)
    out = torch.empty(LAYOUT.shard_numel)
    rows = [sent.chunk(2)[0], sent.chunk(2)[0]]
    wire.reduce(out, rows, scale=0.5)
    said = torch.empty(LAYOUT.shard_numel)
    ss.MessageWire("nvfp4", rounding="nearest").reduce(said, rows)
    assert torch.equal(out, hadamard16(said, inverse=True) * 0.5)
    before = out.clone()
    wire.reduce(out, rows, scale=0.5, accumulate=True)
    assert torch.equal(out, before + before)


@pytest.mark.parametrize("feedback", [None, torch.float32], ids=["lost", "fed back"])
def test_blocks_that_a_tensor_fills_in_part_come_back_from_the_transform(feedback: Any) -> None:
    wire = ss.MessageWire("fp16", rounding="nearest", hadamard=True, error_feedback=feedback)
    flat = gradients()
    residual = None if feedback is None else torch.zeros(LAYOUT.numel)
    out = received(wire, packed(wire, source_of(flat, residual=residual)))
    torch.testing.assert_close(out, flat, rtol=0, atol=2**-10 * flat.abs().max().item())


def test_names_say_what_is_sent() -> None:
    names = [repr(ss.MessageWire(name)) for name in GRAD_WIRES]
    options = [
        ss.MessageWire("nvfp4", rounding="nearest"),
        ss.MessageWire("nvfp4", hadamard=True),
        ss.MessageWire("nvfp4", seed=1),
        ss.MessageWire("nvfp4", error_feedback=torch.bfloat16),
    ]
    names += [repr(wire) for wire in options]
    assert len(set(names)) == len(names)
    assert (OPTIONS_GRAD_WIRES, OPTIONS_PARAM_WIRES) == (GRAD_WIRES, PARAM_WIRES)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: ss.MessageWire("int8"), ValueError, r"one of 'fp32', .*'nvfp4', got 'int8'"),
        (lambda: ss.MessageWire("fp16", rounding="stochastic"), ValueError, "no such cast; 'bf16'"),
        (lambda: ss.MessageWire("nvfp4", rounding="up"), ValueError, "'nearest', 'stochastic'"),
        (lambda: ss.MessageWire("nvfp4", hadamard=1), TypeError, "hadamard: expected True or"),
        (lambda: ss.MessageWire("nvfp4", seed=0.5), ValueError, "seed: expected a whole number"),
        (
            lambda: ss.MessageWire("nvfp4", seed_offset=torch.zeros(1)),
            ValueError,
            "seed_offset: expected torch.int64, got torch.float32",
        ),
        (
            lambda: ss.MessageWire("nvfp4", seed_offset=torch.arange(2)),
            ValueError,
            r"seed_offset: expected one element, got shape \(2,\)",
        ),
        (
            lambda: ss.MessageWire("nvfp4", seed_offset=3),  # type: ignore[arg-type]
            TypeError,
            "seed_offset: expected a torch.Tensor, got int",
        ),
        (
            lambda: ss.MessageWire("nvfp4", rounding="nearest", seed_offset=torch.tensor(0)),
            ValueError,
            "seed_offset: expected None with rounding='nearest'",
        ),
        (
            lambda: ss.MessageWire("fp32", error_feedback=torch.float32),
            ValueError,
            "which loses nothing to feed back",
        ),
        (lambda: ss.MessageWire("mxfp4", error_feedback=True), TypeError, "float32 or torch.bf"),
        (lambda: ss.MixedPrecisionPolicy(grad_wire="fp4"), ValueError, "got 'fp4'; pass one of"),
        (lambda: ss.MixedPrecisionPolicy(param_wire="mxfp4"), ValueError, "'nvfp4', got 'mxfp4'"),
        (lambda: ss.MixedPrecisionPolicy(param_wire=4), ValueError, "param_wire: expected one of"),
        (lambda: ss.MixedPrecisionPolicy(wire_rules=3), TypeError, "sidestream.WireRules in a"),
        (lambda: ss.WireRule("norm"), TypeError, "a module class or a function of a parameter's"),
        (lambda: ss.WireRule(int), TypeError, "got the class int"),
        (
            lambda: ss.WireRule(nn.Linear(2, 2), "bf16"),
            TypeError,
            "got Linear; pass .* of the name",
        ),
        (lambda: ss.WireRule(nn.Linear, grad_wire="x"), ValueError, "WireRule: grad_wire"),
    ],
)
def test_bad_options_are_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens))).logsumexp(-1).mean()


def chosen(**options: Any) -> dict[str, tuple[str, str]]:
    model = Model()
    ss.fully_shard(model, mixed_precision_policy=ss.MixedPrecisionPolicy(**options))
    units = ss.summary(model).units
    names = [unit.spec.names for unit in runtime_of(model).units]
    return {
        name: (unit.wire, unit.param_wire)
        for unit, members in zip(units, names, strict=True)
        for name in members
    }


def test_vectors_travel_in_bf16_unless_a_rule_says_otherwise() -> None:
    found = chosen(grad_wire="mxfp8", param_wire="mxfp8")
    vectors = {"norm.weight", "norm.bias", "head.bias"}
    assert {name for name, wires in found.items() if wires == ("mxfp8", "mxfp8")} == (
        set(found) - vectors
    )
    assert {found[name] for name in vectors} == {("bfloat16", "float32")}
    rules = (
        ss.WireRule(nn.LayerNorm, grad_wire="fp32"),
        ss.WireRule(lambda name, param: name.startswith("head"), "nvfp4", "bf16"),
        ss.WireRule(nn.Linear, "fp16"),
    )
    found = chosen(grad_wire="mxfp8", param_wire="mxfp8", wire_rules=rules)
    assert found["norm.weight"] == ("float32", "float32")
    assert found["head.weight"] == found["head.bias"] == ("nvfp4, stochastic", "bf16")
    assert found["embed.weight"] == ("mxfp8", "mxfp8")
    # What is no format with scales serves vectors as well.
    assert set(chosen(grad_wire="bf16", param_wire="bf16").values()) == {("bfloat16", "bf16")}


@pytest.mark.parametrize(
    "rule",
    [ss.WireRule(nn.Conv2d), ss.WireRule(lambda name, param: False, "fp32")],
    ids=["class", "function"],
)
def test_a_rule_that_matches_nothing_is_refused(rule: ss.WireRule) -> None:
    with pytest.raises(ValueError, match=r"WireRule\(.*matches none of embed.weight"):
        chosen(grad_wire="mxfp8", wire_rules=(rule,))


def test_native_sums_take_no_messages() -> None:
    policy = ss.MixedPrecisionPolicy(wire_rules=(ss.WireRule(nn.Linear, "mxfp8"),))
    with pytest.raises(ValueError, match="which only itself can sum"):
        ss.fully_shard(Model(), mixed_precision_policy=policy, reduce="native")


def rules_differ(rank: int, world_size: int) -> None:
    rule = ss.WireRule(lambda name, param: name.startswith("eh"[rank]), "mxfp8")
    policy = ss.MixedPrecisionPolicy(wire_rules=(rule,))
    with pytest.raises(ValueError, match=r"rank 1: 'embed.weight' has .*on rank 0 .*in mxfp8\)"):
        ss.fully_shard(Model(), mixed_precision_policy=policy)


def test_ranks_whose_rules_choose_differently_are_told() -> None:
    run_on_ranks(rules_differ, 2)


def weights_follow(rank: int, world_size: int, zero: int) -> None:
    """What a forward computes with is what messages say of the FP32 main weights, always."""
    torch.manual_seed(0)
    model = nn.Linear(70, 33, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16, param_wire="mxfp8")
    ss.fully_shard(model, optimizer, mixed_precision_policy=policy, zero_dp_strategy=zero)
    layout = runtime_of(model).units[0].spec.layout
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))

    def check(what: str) -> None:
        main = torch.zeros(layout.numel)
        weight = ss.full_state_dict(model)["weight"]
        assert weight.dtype == torch.float32
        main[: weight.numel()] = weight.flatten()
        message = torch.empty(message_layout("mxfp8", [layout.numel]).num_bytes, dtype=torch.uint8)
        pack_message_(message, [main], "mxfp8")
        said = torch.empty(layout.numel, dtype=torch.bfloat16)
        unpack_message_([said], message, "mxfp8")
        seen.clear()
        model(torch.ones(2, 70)).sum().backward()
        assert torch.equal(seen[0].flatten(), said[: weight.numel()]), what
        assert not torch.equal(seen[0], weight.bfloat16()), what

    check("at the start")
    for step in range(2):
        optimizer.step()
        check(f"after step {step}")
    state = {"weight": torch.linspace(-3, 3, 70 * 33).view(33, 70)}
    model.load_state_dict(state)
    check("after a load")
    with ss.gathered(model, write=True), torch.no_grad():
        assert torch.equal(model.weight, state["weight"].bfloat16())
        model.weight[3] += 1
    weight = ss.full_state_dict(model)["weight"]
    assert torch.equal(weight[[0, 1, 2]], state["weight"][:3]), "what was not written stays"
    assert torch.equal(weight[3], (state["weight"].bfloat16()[3] + 1).float())
    check("after an edit")


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_weights_are_never_stale(zero: int) -> None:
    run_on_ranks(weights_follow, 2, zero)


def test_training_after_an_evaluation_in_inference_mode() -> None:
    """Gradients get the memory in which messages of weights were evaluated."""
    model, x = nn.Linear(64, 64, bias=False), torch.randn(2, 64)
    policy = ss.MixedPrecisionPolicy(grad_wire="mxfp8", param_wire="mxfp8")
    ss.fully_shard(model, mixed_precision_policy=policy)
    with torch.inference_mode():
        evaluated = model(x)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, evaluated) and model.weight.grad.full_tensor().any()


BYTES = {"bf16": 2.001, "mxfp8": 1.04, "nvfp4": 0.57, "mxfp4": 0.54}


def bytes_of(rank: int, world_size: int, wire: str) -> None:
    """Blocks of GPT-2's width, counted in the arguments of the collectives."""
    model = build_model(GPTConfig(num_layers=1, width=768, num_heads=12), 0)
    policy = ss.MixedPrecisionPolicy(grad_wire=wire)
    options = {"fsdp_unit_modules": [Block], "zero_dp_strategy": 2}
    ss.fully_shard(model, mixed_precision_policy=policy, **options)
    numel = sum(param.numel() for param in model.parameters())
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    sent = runtime_of(model).collectives.traffic.sent_bytes["exchange"]
    assert sent * world_size / (world_size - 1) / numel <= BYTES[wire]


@pytest.mark.parametrize("wire", BYTES)
def test_bytes_of_an_element(wire: str) -> None:
    run_on_ranks(bytes_of, 2, wire)


def test_gradients_say_where_they_begin() -> None:
    params = [nn.Parameter(torch.ones(segment.shape)) for segment in LAYOUT.segments]
    for param in (params[0], params[2]):
        param.grad = torch.ones_like(param)
    packer = GradientPacker(LAYOUT, torch.float32, BufferPool(torch.device("cpu")), FIRST)
    grads = packer.take(params)
    _, offsets = grads.present()
    assert grads.places.indices_at(offsets) == [FIRST[0], FIRST[2]]
