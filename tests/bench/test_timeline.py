"""Tests of the timeline: lanes, exposed communication and the picture, from made-up events."""

import pytest

from sidestream.bench.timeline import (
    COMPUTE,
    MESSAGE_RANGE,
    STEP_RANGE,
    WAIT,
    WAIT_RANGE,
    as_html,
    read_timeline,
)


def _event(name: str, start_ms: float, end_ms: float, category: str = "user_annotation") -> dict:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": 1e6 + start_ms * 1e3,
        "dur": (end_ms - start_ms) * 1e3,
    }


STEPS = [_event(STEP_RANGE, 0, 10), _event(STEP_RANGE, 12, 22)]


def _pairs(timeline, lane):
    return [(round(span.start_ms, 6), round(span.end_ms, 6)) for span in timeline.lanes[lane]]


def test_compute_is_what_is_left_of_the_training_thread():
    timeline = read_timeline(
        [
            *STEPS,
            _event(WAIT_RANGE, 1, 2),
            _event("sidestream::start gradient exchange of unit 'a'", 2, 3),
            _event("sidestream::complete gradient exchange of unit 'a'", 5, 6),
            _event("Optimizer.step#AdamW.step", 9, 10),
        ]
    )
    assert _pairs(timeline, COMPUTE) == [(0, 1), (3, 5), (6, 9), (12, 22)]
    assert [lane for lane in timeline.lanes] == [COMPUTE, "pack", "sum", "optimizer", WAIT]
    assert timeline.length_ms == pytest.approx(20)
    assert timeline.busy_ms("pack") == pytest.approx(0.5)


def test_exposed_share_counts_overlapping_waits_once():
    timeline = read_timeline([*STEPS, _event(WAIT_RANGE, 1, 3), _event(WAIT_RANGE, 2, 5)])
    assert timeline.exposed_share == pytest.approx(4 / 20)


@pytest.mark.parametrize(
    ("name", "lane"),
    [
        ("gloo:_allgather_base", "gather"),
        ("gloo:all_to_all", "exchange"),
        ("gloo:_reduce_scatter_base", "exchange"),
        ("sidestream::start gradient accumulation of unit 'a'", "pack"),
    ],
)
def test_operations_on_a_cpu_have_their_lane(name, lane):
    assert _pairs(read_timeline([*STEPS, _event(name, 3, 4)]), lane) == [(3, 4)]


@pytest.mark.parametrize(
    ("start", "message", "lane"),
    [
        ("sidestream::start gradient exchange of unit 'a'", "gloo:send", "exchange"),
        ("sidestream::start gather of unit 'a'", "gloo:recv", "gather"),
        ("sidestream::complete gradient exchange of unit 'a'", "gloo:send", "gather"),
        (f"{MESSAGE_RANGE}exchange", "gloo:recv", "exchange"),
        (f"{MESSAGE_RANGE}gather", "gloo:send", "gather"),
    ],
)
def test_a_message_belongs_to_the_range_that_starts_it(start, message, lane):
    timeline = read_timeline([*STEPS, _event(start, 3, 4), _event(message, 3.5, 8)])
    assert (3.5, 8) in _pairs(timeline, lane)


def test_starting_a_gather_is_compute():
    """It takes the host's time, and packs nothing."""
    timeline = read_timeline([STEPS[0], _event("sidestream::start gather of unit 'a'", 3, 4)])
    assert set(timeline.lanes) == {COMPUTE}


def test_events_outside_the_steps_do_not_count():
    timeline = read_timeline([*STEPS, _event("gloo:recv", -5, -1), _event(WAIT_RANGE, 30, 40)])
    assert set(timeline.lanes) == {COMPUTE}


def test_exposed_on_a_gpu_is_where_no_other_kernel_runs():
    timeline = read_timeline(
        [
            STEPS[0],
            _event("gemm", 0, 4, "kernel"),
            _event("ncclDevKernel_AllGather_RING", 2, 6, "kernel"),
            _event("_pack_kernel", 5, 5.5, "kernel"),
            _event("_reduce_kernel", 6, 7, "kernel"),
            _event("void at::native::reduce_kernel<512>", 7, 8, "kernel"),
            _event("ncclDevKernel_SendRecv", 8, 10, "kernel"),
            _event("multi_tensor_apply_kernel", 9, 10, "kernel"),
            _event("Memcpy DtoD", 10, 11, "gpu_memcpy"),
        ]
    )
    assert _pairs(timeline, "gather") == [(2, 6)]
    assert _pairs(timeline, "exchange") == [(8, 10)]
    assert _pairs(timeline, "pack") == [(5, 5.5)]
    assert _pairs(timeline, "sum") == [(6, 7)]
    assert _pairs(timeline, COMPUTE) == [(0, 4), (7, 8), (10, 11)]
    assert _pairs(timeline, WAIT) == [(4, 5), (5.5, 6), (8, 9)]
    assert timeline.exposed_share == pytest.approx(2.5 / 11)


def test_stand_ins_on_a_gpu_go_to_the_lane_of_their_launch():
    def numbered(event, correlation):
        return {**event, "args": {"correlation": correlation}}

    timeline = read_timeline(
        [
            STEPS[0],
            _event("bench::stand-in gather", 1, 2),
            numbered(_event("cudaLaunchKernel", 1.2, 1.3, "cuda_runtime"), 7),
            _event("bench::stand-in exchange", 3, 4),
            numbered(_event("cudaLaunchKernel", 3.2, 3.3, "cuda_runtime"), 8),
            numbered(_event("cudaLaunchKernel", 5, 5.1, "cuda_runtime"), 9),
            numbered(_event("spin_kernel", 10, 12, "kernel"), 7),
            numbered(_event("spin_kernel", 13, 14, "kernel"), 8),
            numbered(_event("gemm", 11, 12, "kernel"), 9),
        ]
    )
    assert _pairs(timeline, "gather") == [(0, 2)]
    assert _pairs(timeline, "exchange") == [(3, 4)]
    assert _pairs(timeline, COMPUTE) == [(1, 2)]
    assert _pairs(timeline, WAIT) == [(0, 1), (3, 4)]


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match=r"must hold steps inside a range 'bench::step'.*1 events"):
        read_timeline([_event("gemm", 0, 1)])


def test_picture_holds_every_span_and_escapes_names():
    timeline = read_timeline(
        [STEPS[0], _event("gloo:recv", 2, 4), _event("sidestream::start gradient <x>", 5, 6)]
    )
    page = as_html({"zero3": timeline}, "one & only")
    assert page.count("<rect") == sum(len(spans) for spans in timeline.lanes.values()) == 4
    assert "x='20.0000%'" in page and "width='20.0000%'" in page
    assert "&lt;x&gt;" in page and "one &amp; only" in page and "<x>" not in page
    assert "zero3: 10.0 ms a step" in page
