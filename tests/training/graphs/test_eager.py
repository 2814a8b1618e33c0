"""`FullStepGraph` on a CPU, where steps run as they are; what it refuses, and takes for alike."""

import dataclasses
import logging
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.capture import StepRecorder
from sidestream.tests.ranks import run_on_ranks
from sidestream.training.graphs import FullStepGraph
from sidestream.training.graphs.static_inputs import (
    buffers_like,
    fill,
    key_of,
    tensors_of,
    with_tensors,
)
from sidestream.training.packing import pack, pack_batch


class Subclass(Tensor):
    pass


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: Tensor
    more: dict[str, Any]


def nested(offset: float = 0.0, name: str = "a") -> Any:
    tokens = torch.arange(6.0).view(2, 3) + offset
    return [Batch(tokens, {"mask": tokens.t(), "name": name}), Pair(tokens[0], (1, None))]


def test_a_cpu_runs_steps_as_they_are_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sidestream")
    model = nn.Linear(3, 1)

    def step(x: Tensor, *, scale: float) -> dict[str, Any]:
        loss = model(x).sum() * scale
        loss.backward()
        return {"loss": loss, "scale": scale}

    graphed = FullStepGraph(step, [model])
    x = torch.ones(2, 3)
    found = graphed(x, scale=2.0)
    assert not found["loss"].requires_grad and found["scale"] == 2.0
    assert torch.equal(model.weight.grad, torch.full((1, 3), 4.0))  # type: ignore[arg-type]
    assert (graphed.captures, graphed.num_graphs) == (False, 0)
    graphed.reset()
    assert [record.message for record in caplog.records] == [
        "FullStepGraph: steps run eagerly, without a graph, on cpu"
    ]


def test_a_cpu_refuses_what_a_gpu_would() -> None:
    model = nn.Linear(3, 1)
    graphed = FullStepGraph(lambda x: model(x).sum().backward(), [model])
    batch = pack_batch([torch.arange(2)], pack([2], 3))
    with pytest.raises(TypeError, match="got Kept, which no CUDA graph can follow; pass its tens"):
        graphed(batch)
    graphed(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"expected cleared gradients .* some of 'weight'"):
        graphed(torch.ones(3))


def test_inputs_with_the_same_key_go_through_the_same_buffers() -> None:
    first, second = nested(), nested(5.0)
    assert key_of(first) == key_of(second)
    buffers = buffers_like(tensors_of(first), torch.device("cpu"))
    fill(buffers, tensors_of(second))
    given = with_tensors(first, buffers)
    assert type(given[0]) is Batch and type(given[1]) is Pair
    assert torch.equal(given[0].more["mask"], second[0].more["mask"])
    assert given[0].more["mask"].stride() == second[0].more["mask"].stride()
    expanded = torch.ones(1).expand(4)
    assert buffers_like([expanded], torch.device("cpu"))[0].is_contiguous()


OTHERS = {
    "plain value": nested(name="b"),
    "shape": [torch.ones(3)],
    "dtype": [torch.ones(2, dtype=torch.float64)],
    "container": (torch.ones(2),),
    "integer for float": [torch.ones(2), 1],
    "float for integer": [torch.ones(2), 1.0],
    "flag": [torch.ones(2), True],
    "nan": [torch.ones(2), float("nan")],
}


def test_other_inputs_have_other_keys() -> None:
    keys = [key_of(value) for value in (nested(), [torch.ones(2)], *OTHERS.values())]
    assert len(set(keys)) == len(keys)
    assert key_of([torch.ones(2), float("nan")]) == keys[-1]


BAD = {
    "gradient": (
        torch.ones(1, requires_grad=True),
        ValueError,
        r"inputs\[0\]\['x'\]: .*no gradient",
    ),
    "sparse": (torch.ones(2).to_sparse(), ValueError, "strided tensor, got torch.sparse_coo"),
    "subclass": (torch.ones(2).as_subclass(Subclass), TypeError, "got the subclass Subclass"),
    "object": (SimpleNamespace(), TypeError, "got SimpleNamespace, which no CUDA graph"),
}


@pytest.mark.parametrize(("value", "error", "message"), BAD.values(), ids=BAD)
def test_inputs_that_no_graph_can_take(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        key_of([{"x": value}])


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "step": ({"step": 1}, TypeError, "step: expected a function, got int"),
    "modules": ({"modules": nn.Linear(1, 1)}, TypeError, r"modules: .* got Linear; pass \[model\]"),
    "warmup_steps": ({"warmup_steps": 0}, ValueError, "warmup_steps: .* at least 1, got 0"),
    "max_graphs": ({"max_graphs": 1.5}, ValueError, "max_graphs: .* got 1.5"),
    "generators": ({"generators": [1]}, TypeError, "torch.Generator objects, got int"),
    "generator elsewhere": (
        {"generators": [torch.Generator()], "device": "meta"},
        ValueError,
        "expected some of meta, where the step runs, got one of cpu",
    ),
    "on_failure": ({"on_failure": "stop"}, ValueError, "expected one of raise, eager, got 'stop'"),
}


@pytest.mark.parametrize(("change", "error", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FullStepGraph(**{"step": len, "modules": [], **change})


def test_a_part_of_a_sharded_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    ss.fully_shard(model)
    with pytest.raises(ValueError, match="expected the module that was passed to fully_shard"):
        FullStepGraph(len, [model[0]])


def _reasons(rank: int, world_size: int) -> tuple[int, list[str], list[str]]:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    options = {"fsdp_unit_modules": [nn.Linear], "zero_dp_strategy": 2}
    policy = ss.MixedPrecisionPolicy(grad_wire="nvfp4")
    ss.fully_shard(model, mixed_precision_policy=policy, **options)
    recorder = StepRecorder(model)
    first = recorder.reasons()
    model(torch.ones(1, 256)).sum().backward()
    kept = recorder.kept_gradients()
    with ss.gathered(model):
        inside = recorder.reasons()
    return recorder.least(5 - rank), first, kept + inside


def test_why_a_model_cannot_be_recorded() -> None:
    for least, first, then in run_on_ranks(_reasons, 2):
        assert least == 4
        assert [text.partition(";")[0] for text in first] == [
            "the ranks agree on the order of exchanges at the end of the first backward",
            "collectives go by gloo, where the host waits",
            "noise of stochastic rounding counts on the host, so that replays would repeat it",
        ]
        assert {text for text in then if len(text) == 1} == {"0", "1"}
        assert any("whole inside gathered()" in text for text in then)
        assert not any("order of exchanges" in text for text in then)
