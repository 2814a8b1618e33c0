"""A collective that nobody ends is told, with its unit and ranks, before its time limit passes."""

import contextlib
import datetime
import gc
import os
import pickle
import re
import signal
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh

import sidestream as ss
from sidestream.bench.virtual_streams import Machine, Stream
from sidestream.sharding import monitor
from sidestream.sharding.collectives import Pending
from sidestream.sharding.errors import CommunicationError
from sidestream.sharding.explanation import explain_runtime
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.in_flight import EnqueuedWork, WorkLog, host_waits, noting
from sidestream.sharding.monitor import MONITOR, Monitor, Watched, dump_flight_record, find_late
from sidestream.sharding.runtime import Runtime
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.on_streams import run
from sidestream.tests.sharding.trainer import Job, build, run_step
from sidestream.tests.sharding.warned import warned

LIMIT_S = 10.0


class Group:
    """A process group with a time limit, which can be referred to weakly."""

    _device_types = ("cpu",)

    def _get_backend(self, _: object) -> Any:
        return mock.Mock(options=mock.Mock(_timeout=datetime.timedelta(seconds=LIMIT_S)))


class Event:
    """Of a stream whose work ends when it is told to; counts who asks."""

    def __init__(self) -> None:
        self.has_come, self.num_asked = False, 0

    def query(self) -> bool:
        self.num_asked += 1
        return self.has_come


def on_streams(group: Any, *names: str) -> tuple[Watched, list[Event]]:
    """A model whose lane was given works now, in that order."""
    log = WorkLog(on_gpu=True)
    events = [Event() for _ in names]
    for name, event in zip(names, events, strict=True):
        log.add(EnqueuedWork(name, time.monotonic(), event))
    return Watched(lambda: None, weakref.ref(group), (log,)), events  # type: ignore[arg-type]


def names_of(late: list[monitor.Late]) -> list[str]:
    return [one.what.what for one in late]


def test_a_work_that_never_ends_is_late_from_most_of_the_limit_on() -> None:
    group = Group()
    watched, events = on_streams(group, "gather of unit 'a'", "gather of unit 'b'")
    now_s = time.monotonic()
    assert find_late([watched], [], now_s + 0.7 * LIMIT_S) == []
    assert [event.num_asked for event in events] == [0, 0], "no event is asked before"
    late = find_late([watched], [], now_s + 0.9 * LIMIT_S)
    assert names_of(late) == ["gather of unit 'a'"], "the oldest alone"
    assert late[0].limit_s == LIMIT_S
    assert late[0].what.lasting_s == pytest.approx(0.9 * LIMIT_S, abs=1.0)
    events[0].has_come = True
    assert names_of(find_late([watched], [], now_s + LIMIT_S)) == ["gather of unit 'b'"]
    events[1].has_come = True
    assert find_late([watched], [], now_s + LIMIT_S) == []


def test_a_wait_of_the_host_is_late_by_its_own_groups_limit() -> None:
    group: Any = Group()
    watched, _ = on_streams(group)
    now_s = time.monotonic() + 0.9 * LIMIT_S
    for waiting in (_in_operation, _in_section):
        found = waiting("a norm", group, lambda: find_late([watched], host_waits(), now_s))
        assert names_of(found) == ["a norm"]
    assert find_late([watched], host_waits(), now_s) == [], "the wait has ended"
    assert _in_section("a norm", None, lambda: find_late([], host_waits(), now_s)) == []


def _in_operation(what: str, group: Any, look: Any) -> Any:
    found = []
    Pending(mock.Mock(wait=lambda: found.append(look())), what, group).wait()
    return found[0]


def _in_section(what: str, group: Any, look: Any) -> Any:
    with noting(what, group):
        return look()


def test_waits_lie_in_each_other() -> None:
    with noting("a load"):
        _in_operation("a gather", None, lambda: None)
        assert [wait.what for wait in host_waits()] == ["a load"]
    with contextlib.suppress(ArithmeticError), noting("a load"):
        raise ArithmeticError
    assert host_waits() == []


def test_what_waits_is_told_once() -> None:
    ours, group = Monitor(), Group()
    watched, events = on_streams(group, "gather of unit 'a'")
    ours._watched[0] = watched
    with warned() as texts, mock.patch.object(monitor, "SUSPECT_SHARE", 0.0):
        ours.look()
        ours.look()
        assert len(texts) == 1
        assert re.search(r"gather of unit 'a' for 0\.0 s, and fails after 10 s", texts[0])
        events[0].has_come = True
        watched.logs[0].add(EnqueuedWork("gather of unit 'b'", time.monotonic(), Event()))
        ours.look()
        assert len(texts) == 2 and "unit 'b'" in texts[1]


class SlowClock(dict[Any, Any]):
    """An event of a fake stream, which comes when all are told to."""

    have_come = False

    def query(self) -> bool:
        return self.have_come


def test_what_streams_were_given_is_in_flight_until_its_event_has_come() -> None:
    def find(runtime: Runtime) -> tuple[list[str], str, str]:
        works = [work.what for lane in runtime.lanes for work in lane.log.in_flight()]
        hung = str(explain_runtime(runtime))
        SlowClock.have_come = True
        return works, hung, str(explain_runtime(runtime))

    slow = mock.patch.object(Stream, "record_event", lambda stream: SlowClock(stream.clock))
    with slow, mock.patch.object(SlowClock, "have_come", False):
        works, hung, ended = run(Machine(), Job(zero=3), find=find)
    blocks = [f"unit 'blocks.{index}'" for index in range(3)]
    assert {work for work in works if work.startswith("gather of")} == {
        f"gather of {unit}" for unit in ("unit '(root)'", *blocks)
    }
    # Two steps of one backward each; nothing has ended.
    assert works.count("gradient exchange of unit 'blocks.1'") == 2
    assert "in flight: gather of unit 'blocks.1' for " in hung
    assert "in flight: nothing" in ended


def test_a_rank_says_what_its_streams_wait_for_and_asks_no_young_event() -> None:
    def find(runtime: Runtime) -> tuple[Any, Any]:
        ours, group = Monitor(), Group()
        logs = tuple(WorkLog(on_gpu=True) for _ in range(2))
        events = [Event(), Event()]
        for log, event in zip(logs, events, strict=True):
            log.add(EnqueuedWork("gather of unit 'blocks.1'", time.monotonic(), event))
        weak: Any = weakref.ref(group)
        ours._watched[0] = Watched(weakref.ref(runtime), weak, logs)
        young = ours._account(weak)
        assert [event.num_asked for event in events] == [0, 0]
        events[1].has_come = True
        with mock.patch.object(monitor, "ASK_SHARE", 0.0):
            return young, ours._account(weak)

    young, old = run(Machine(), Job(zero=3), find=find)
    assert young.waits == ()
    assert [wait.what for wait in old.waits] == ["gather of unit 'blocks.1'"]
    assert old.waits[0].number > 0, "ranks that agree on it stand in the same one"
    assert any("unit" in event for event in old.events)


def test_a_work_that_could_not_be_started_is_not_in_flight() -> None:
    model, _ = build(Job(zero=2))
    runtime = runtime_of(model)
    with pytest.raises(ArithmeticError):
        runtime.lanes[0].submit("a gather", _fail)
    assert runtime.lanes[0].log.in_flight() == []


def _fail() -> Any:
    raise ArithmeticError


def over_short_group(rank: int, limit_s: float) -> Any:
    group = dist.new_group(timeout=datetime.timedelta(seconds=limit_s))
    mesh = DeviceMesh.from_group(group, "cpu")
    return build(Job(zero=3, options={"device_mesh": mesh}))


def a_rank_stops(rank: int, world_size: int) -> tuple[str, list[str]]:
    job = Job(zero=3)
    model, optimizer = over_short_group(rank, 3.0)
    run_step(model, optimizer, job, 0, rank, world_size)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "", []
    began = time.monotonic()
    with warned() as texts:
        try:
            run_step(model, optimizer, job, 1, rank, world_size)
        except CommunicationError as error:
            assert texts, "told before the group gives up"
            assert time.monotonic() - began < 8.0
            return str(error), texts
        finally:
            os.kill(pids[1], signal.SIGCONT)
    raise AssertionError("the other rank was there")


def test_a_stopped_rank_is_told_before_the_collective_fails() -> None:
    error, texts = run_on_ranks(a_rank_stops, 2, timeout_s=60)[0]
    assert re.search(r"gather of unit '\(root\)' from rank 1 failed", error)
    assert len(texts) == 1
    head, *rest = texts[0].splitlines()
    awaited = r"rank 0: gather of unit '\(root\)' from rank 1 for 2\.\d s, of ranks 0, 1, and fails"
    assert re.match(awaited + " after 3 s; look for the rank", head)
    told_of = "\n".join(rest)
    assert "in the forward of '(root)'" in told_of
    assert "unit '(root)': gathering" in told_of
    assert "in flight: gather of unit 'blocks.0' for 2." in told_of


def monitored_models_go(rank: int, world_size: int) -> None:
    model, _ = build(Job(zero=3))
    runtime = weakref.ref(runtime_of(model))
    thread = next(one for one in threading.enumerate() if one.name == "monitor")
    MONITOR.look()
    del model, _
    assert runtime() is None, "only the garbage collector would free it"
    assert not MONITOR._watched
    with MONITOR._changed:
        MONITOR._changed.notify()
    thread.join(10)
    assert not thread.is_alive(), "nothing is left to watch"
    _kept = build(Job(zero=3))
    assert any(one.name == "monitor" and one.is_alive() for one in threading.enumerate())


def test_the_monitor_keeps_no_model_alive() -> None:
    run_on_ranks(monitored_models_go, 2)


def test_without_a_group_there_is_nothing_to_watch() -> None:
    gc.collect()
    before = len(MONITOR._watched)
    model, _ = build(Job(zero=3))
    assert len(MONITOR._watched) == before
    assert ss.explain(model).waits == ()


def records(rank: int, world_size: int, prefix: str, nccl_entries: list[str] | None) -> str:
    dist.barrier()
    assert dump_flight_record({}, rank) is None, "nobody asked for it"
    told: Any = contextlib.nullcontext()
    if nccl_entries is not None:
        record = pickle.dumps({"entries": nccl_entries})
        told = mock.patch.object(_c10d, "_dump_nccl_trace", lambda: record, create=True)
    with told:
        path = dump_flight_record({"TORCH_FR_DUMP_TEMP_FILE": prefix}, rank)
        assert path is not None
        assert dump_flight_record({"TORCH_FR_DUMP_TEMP_FILE": f"{prefix}/none/"}, rank) is None
    return str(path)


@pytest.mark.parametrize(
    "nccl_entries", [None, [], ["of NCCL"]], ids=["as built", "NCCL unused", "NCCL used"]
)
def test_torchs_record_is_written_where_its_own_dumps_go(
    tmp_path: Any, nccl_entries: list[str] | None
) -> None:
    paths = run_on_ranks(records, 2, str(tmp_path / "record_"), nccl_entries)
    assert paths == [str(tmp_path / f"record_{rank}") for rank in range(2)]
    for path in paths:
        with open(path, "rb") as file:
            entries = pickle.load(file)["entries"]
        assert entries == nccl_entries if nccl_entries else entries
