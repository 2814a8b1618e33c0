"""Who decides whether sums read peers' memory: all ranks, by what each can; else they refuse."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sidestream as ss
from sidestream.sharding.collectives import Channel, Pending
from sidestream.sharding.data_parallel_groups import Axis
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.peer_memory import Reach
from sidestream.sharding.routes import find_obstacles
from sidestream.sharding.wire import PlainWire
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding import shared_files, trainer
from sidestream.tests.sharding.axes import groups_over
from sidestream.tests.sharding.meshes import options_of
from sidestream.tests.sharding.shared_files import sharing
from sidestream.tests.sharding.trainer import Job


def groups(*sizes: int) -> Any:
    group: Any = object()
    axes = [
        Axis(f"axis{place}", range(size), 0, *((group, group) if size > 1 else (None, None)))
        for place, size in enumerate(sizes)
    ]
    return groups_over(axes, group, torch.device("cuda"))


def on_nodes(count: int, nodes: Sequence[str]) -> list[Reach]:
    """So many ranks, of which neighbours along the first axis are on `nodes` in turn."""
    gpus = [f"GPU {rank}" for rank in range(count)]
    return [Reach(nodes[rank], gpus[rank], frozenset(gpus)) for rank in range(count)]


def test_axes_decide_each_for_itself_and_for_all_of_its_ranks() -> None:
    # Of ranks (i, j) along two axes: i counts slowly.
    apart = on_nodes(4, ["m", "n", "m", "n"])
    first, second = find_obstacles("on", groups(2, 2), apart)
    assert first == "" and second == "ranks 0 and 1 are on two machines"
    # One line of the first axis lies on two machines: no line reads memory.
    one_line = on_nodes(4, ["m", "m", "m", "n"])
    assert all(find_obstacles("auto", groups(2, 2), one_line))
    assert find_obstacles("auto", groups(2), on_nodes(2, "mm")) == [""]


def test_on_refuses_where_gradients_travel_along_an_axis_that_cannot() -> None:
    apart = on_nodes(4, ["m", "m", "n", "n"])
    with pytest.raises(ValueError, match=r"'axis0'.* but ranks 0 and 2 are on two machines"):
        find_obstacles("on", groups(2, 2), apart)
    with pytest.raises(ValueError, match="ranks along 'axis1' that read each other's memory"):
        find_obstacles("on", groups(1, 2), on_nodes(2, "mn"))
    assert find_obstacles(
        "on", groups(1), [Reach("m", "", frozenset(), "the model is on the CPU")]
    ) == ["one rank"]


# ---- what fully_shard says


class OwnWire(PlainWire):
    """Moves what it sends by itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.name = "own"

    def exchange(
        self, channel: Channel, received: Tensor, sent: Tensor, what: str
    ) -> list[Pending]:
        return channel.exchange(received, sent, what)


def refused(rank: int, world_size: int) -> None:
    own = ss.MixedPrecisionPolicy(grad_wire=OwnWire(torch.float32))
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "'on' asks for, but on rank 0 the model is on the CPU; pass 'auto'", {}),
        (ValueError, "expected 'off', 'auto' or 'on', got True", {"symmetric_memory": True}),
        (ValueError, "reduce='native', where the backend moves and sums", {"reduce": "native"}),
        (ValueError, "OwnWire.* which moves itself what it sends", {"mixed_precision_policy": own}),
        (
            ValueError,
            "rank 1: symmetric_memory is 'auto', on rank 0 'on'",
            {"symmetric_memory": ("on", "auto")[rank]},
        ),
    ]
    model = trainer.Transformer()
    before = dict(model.named_parameters())
    for kind, message, options in cases:
        with pytest.raises(kind, match=message):
            ss.fully_shard(model, **{"symmetric_memory": "on", **options})
        assert dict(model.named_parameters()) == before


def test_what_is_refused_changes_nothing() -> None:
    run_on_ranks(refused, 2)


def route_of(symmetric_memory: str, **options: Any) -> dict[str, str]:
    options = {"symmetric_memory": symmetric_memory, **options}
    model, _ = trainer.build(Job(zero=2, options=options))
    return dict(ss.summary(model).exchanges)


def none_here(rank: int, world_size: int) -> None:
    assert route_of("off") == {"dp_shard": "messages"}
    assert route_of("auto") == {"dp_shard": "messages; on rank 0 the model is on the CPU"}
    with sharing():
        assert route_of("auto")["dp_shard"].startswith("symmetric memory, 2 slots of")
        policy = ss.MixedPrecisionPolicy(grad_wire=OwnWire(torch.float32))
        assert route_of("auto", mixed_precision_policy=policy)["dp_shard"].startswith("messages")
        assert route_of("auto", reduce="native")["dp_shard"].startswith("messages")
        rule = ss.WireRule(trainer.Attention, grad_wire=OwnWire(torch.float32))
        policy = ss.MixedPrecisionPolicy(wire_rules=(rule,))
        with pytest.raises(ValueError, match=r"OwnWire.* for unit 'blocks\.0"):
            trainer.build(Job(options={"symmetric_memory": "on", "mixed_precision_policy": policy}))
        options = {"symmetric_memory": "auto", "mixed_precision_policy": policy}
        model, _ = trainer.build(Job(zero=2, options=options))
        by_wire = {(unit.wire, unit.exchange) for unit in ss.summary(model).units}
        assert by_wire == {("own", "messages"), ("float32", "symmetric memory")}


def test_summary_says_what_exchanges_go_by() -> None:
    run_on_ranks(none_here, 2)
    assert route_of("on") == {"dp_shard": "messages; one rank"}


def fails_on_rank_1(rank: int, world_size: int, step: str) -> None:
    original = getattr(shared_files, step)

    def broken(*args: Any) -> Any:
        found = original(*args)
        if rank == 1:
            raise RuntimeError("no memory left\nat all")
        return found

    name = "CudaMemory" if step == "FileMemory" else step
    model = trainer.Transformer()
    before = dict(model.named_parameters())
    with sharing(**{name: broken}):
        assert route_of("auto") == {"dp_shard": "messages; rank 1 got: no memory left"}
        with pytest.raises(ValueError, match="but rank 1 got: no memory left; pass 'auto'"):
            ss.fully_shard(model, symmetric_memory="on")
    assert dict(model.named_parameters()) == before


@pytest.mark.parametrize("step", ["allocate", "FileMemory"])
def test_memory_that_one_rank_does_not_get_no_rank_uses(step: str) -> None:
    run_on_ranks(fails_on_rank_1, 2, step)


def on_two_nodes(rank: int, world_size: int) -> None:
    def reach(_device: torch.device) -> Reach:
        gpus = [f"GPU {other}" for other in range(world_size)]
        return Reach(f"node {rank // 2}", gpus[rank], frozenset(gpus))

    job = Job(zero=3, steps=2, options=options_of("two nodes"))
    expected = trainer.run(rank, world_size, job)
    with sharing(reach_of=reach):
        with pytest.raises(ValueError, match=r"are on two machines; .* or ranks_per_node where"):
            trainer.build(Job(options={"symmetric_memory": "on"}))
        job = job.but(options={**job.options, "symmetric_memory": "on"})
        found = trainer.run(rank, world_size, job)
        model, _ = trainer.build(job)
    assert found.sha256 == expected.sha256 and found.sent_bytes == expected.sent_bytes
    kinds = {axis: said.partition(",")[0] for axis, said in ss.summary(model).exchanges.items()}
    assert kinds["dp_shard/node"] == "symmetric memory"
    assert kinds["dp_shard/rail"] == "messages; ranks 0 and 2 are on two machines"
    assert runtime_of(model).collectives.world_size == dist.get_world_size()


def test_over_nodes_sums_of_a_node_read_memory_and_others_are_sent() -> None:
    run_on_ranks(on_two_nodes, 4)
