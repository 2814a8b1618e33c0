"""The timeline of profiled steps: from `torch.profiler`'s events to lanes, to the share of
communication that nothing hides, and to a picture.

    CPU   lane         events
          compute      the training thread, but for what is below: operators and Python
          pack, sum    ranges of ours, and the optimizer's, on the training thread
          gather, ...  gloo's operations beside it; a message belongs to the range that starts it,
                       and ends when it is waited for
          wait         the training thread waits for one: exposed communication
    GPU   lane         events
          compute ...  kernels by name; NCCL's and stand-ins for it are communication
          exposed      where communication runs and no other kernel does

Times are milliseconds from the start of the first step. Everything here is pure.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..sharding.ranges import PREFIX

STEP_RANGE = "bench::step"
WAIT_RANGE = "bench::wait"
STAND_IN_RANGE = "bench::stand-in "  # and the lane: on the host, around the launch of a stand-in
MESSAGE_RANGE = "bench::messages "  # and the lane: around the start of a rival's sends and receives
COMPUTE, WAIT = "compute", "wait"
_GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")
COLOURS: Mapping[str, str] = {
    COMPUTE: "#4878a8", "pack": "#e0a030", "sum": "#c86828", "optimizer": "#7a5aa8",
    "gather": "#4a9a5c", "exchange": "#2f7f86", WAIT: "#c03040",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """Something that went on from `start_ms` to `end_ms`."""

    start_ms: float
    end_ms: float
    name: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans by lane, in order of start, and what follows from them for `steps` steps."""

    lanes: dict[str, list[Span]]
    length_ms: float
    steps: int

    def busy_ms(self, lane: str) -> float:
        """Time of one step in which the lane does something."""
        return _measure(_union(self.lanes.get(lane, ()))) / self.steps

    @property
    def exposed_share(self) -> float:
        """The part of the steps' time in which only communication goes on."""
        return self.busy_ms(WAIT) * self.steps / self.length_ms


def read_timeline(events: Sequence[Mapping[str, Any]]) -> Timeline:
    """From the `traceEvents` of a Chrome trace of steps that ran inside `STEP_RANGE`.

    Raises ValueError when there is no such range.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in complete if event["name"] == STEP_RANGE and _is_on_host(event)]
    if not steps:
        raise ValueError(
            f"the trace must hold steps inside a range {STEP_RANGE!r}, got {len(complete)} events "
            f"and none of them; profile with record_function({STEP_RANGE!r})"
        )
    on_gpu = [event for event in complete if event.get("cat") in _GPU_KINDS]
    if on_gpu:
        return _gpu_timeline(on_gpu, _stand_ins(complete), len(steps))
    return _cpu_timeline(complete, steps)


def _is_on_host(event: Mapping[str, Any]) -> bool:
    return not str(event.get("cat", "")).startswith("gpu_")


def _cpu_timeline(
    events: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> Timeline:
    origin = min(step["ts"] for step in steps)
    end = max(step["ts"] + step["dur"] for step in steps)
    lanes: dict[str, list[Span]] = {}
    starts = _ranges(events, _lane_of_messages)
    for event in events:
        if event["ts"] + event["dur"] < origin or event["ts"] > end:
            continue
        lane = _cpu_lane(event, starts)
        if lane is not None:
            lanes.setdefault(lane, []).append(_span(event, origin))
    own = [span for lane in ("pack", "sum", "optimizer", WAIT) for span in lanes.get(lane, ())]
    whole = [_span(step, origin) for step in steps]
    lanes[COMPUTE] = [
        Span(start, stop, COMPUTE) for start, stop in _subtract(_union(whole), _union(own))
    ]
    return _timeline(lanes, _measure(_union(whole)), len(steps))


def _ranges(
    events: Iterable[Mapping[str, Any]], lane_of: Callable[[str], str | None]
) -> list[tuple[float, float, str]]:
    """Start, end and lane of every range on the host to whose name `lane_of` gives a lane."""
    return [
        (event["ts"], event["ts"] + event["dur"], lane)
        for event in events
        if _is_on_host(event) and (lane := lane_of(event["name"])) is not None
    ]


def _lane_of_messages(range_name: str) -> str | None:
    """Of the messages that are started in a range."""
    if range_name.startswith(MESSAGE_RANGE):
        return range_name.removeprefix(MESSAGE_RANGE)
    if range_name.startswith(f"{PREFIX}start gradient"):
        return "exchange"
    # What follows a sum is the gather of it.
    return "gather" if range_name.startswith((f"{PREFIX}start", f"{PREFIX}complete")) else None


def _cpu_lane(event: Mapping[str, Any], starts: Sequence[tuple[float, float, str]]) -> str | None:
    name = event["name"]
    if name == WAIT_RANGE:
        return WAIT
    if name in ("gloo:send", "gloo:recv"):
        return next((lane for begin, end, lane in starts if begin <= event["ts"] <= end), "gather")
    if name.startswith("gloo:"):
        return "gather" if "gather" in name else "exchange"
    if name.startswith("Optimizer.step"):
        return "optimizer"
    if name.startswith(f"{PREFIX}start gradient"):
        return "pack"
    return "sum" if name.startswith(f"{PREFIX}complete gradient") else None


def _stand_ins(events: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """The lane of every stand-in for a collective, by the correlation id of its launch."""
    ranges = _ranges(events, _lane_of_stand_in)
    return {
        event["args"]["correlation"]: lane
        for event in events
        if event.get("cat") in _LAUNCH_KINDS and "correlation" in event.get("args", {})
        for start, stop, lane in ranges
        if start <= event["ts"] <= stop
    }


def _lane_of_stand_in(range_name: str) -> str | None:
    is_one = range_name.startswith(STAND_IN_RANGE)
    return range_name.removeprefix(STAND_IN_RANGE) if is_one else None


def _gpu_timeline(
    events: Sequence[Mapping[str, Any]], stand_ins: Mapping[Any, str], steps: int
) -> Timeline:
    origin = min(event["ts"] for event in events)
    lanes: dict[str, list[Span]] = {}
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        lane = stand_ins.get(correlation) or _gpu_lane(event["name"])
        lanes.setdefault(lane, []).append(_span(event, origin))
    communication = [*lanes.get("gather", ()), *lanes.get("exchange", ())]
    others = [
        span
        for lane, spans in lanes.items()
        if lane not in ("gather", "exchange")
        for span in spans
    ]
    lanes[WAIT] = [
        Span(start, stop, "exposed")
        for start, stop in _subtract(_union(communication), _union(others))
    ]
    length = max(span.end_ms for spans in lanes.values() for span in spans)
    return _timeline(lanes, length, steps)


def _gpu_lane(name: str) -> str:
    low = name.lower()
    if "nccl" in low:
        return "gather" if "gather" in low else "exchange"
    # Ours, as Triton names them; torch's own reductions are C++ templates.
    if low.startswith(("_pack_kernel", "_reduce_kernel")):
        return "pack" if low.startswith("_pack") else "sum"
    if any(part in low for part in ("adam", "sgd", "multi_tensor_apply")):
        return "optimizer"
    return COMPUTE


def _span(event: Mapping[str, Any], origin: float) -> Span:
    start = (event["ts"] - origin) / 1e3
    return Span(start, start + event["dur"] / 1e3, event["name"])


def _timeline(lanes: dict[str, list[Span]], length_ms: float, steps: int) -> Timeline:
    ordered = {
        lane: sorted(lanes[lane], key=lambda span: span.start_ms)
        for lane in COLOURS
        if lane in lanes
    }
    return Timeline(ordered, length_ms, steps)


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover what the spans cover."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted((span.start_ms, span.end_ms) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def _subtract(
    intervals: Sequence[tuple[float, float]], holes: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """What is left of disjoint `intervals` outside disjoint `holes`, both in order."""
    left = []
    for start, stop in intervals:
        edges = [start]
        for low, high in holes:
            if high > start and low < stop:
                edges += [max(low, start), min(high, stop)]
        edges.append(stop)
        left += [pair for pair in zip(edges[::2], edges[1::2], strict=True) if pair[0] < pair[1]]
    return left


def _measure(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in intervals)


def as_html(timelines: Mapping[str, Timeline], heading: str) -> str:
    """One self-contained page: a row of bars for every lane of every candidate, on one scale."""
    length = max(line.length_ms for line in timelines.values())
    rows = []
    for name, line in timelines.items():
        rows.append(
            f"<h2>{html.escape(name)}: {line.length_ms / line.steps:.1f} ms a step, "
            f"{line.exposed_share:.1%} exposed communication</h2>"
        )
        rows += [_svg_row(lane, spans, length) for lane, spans in line.lanes.items()]
    return (
        "<!doctype html><html><head><meta charset='utf-8'><title>sidestream: one step</title>"
        "<style>body{font:14px sans-serif;margin:24px}h2{font-size:15px;margin:18px 0 4px}"
        ".row{display:flex;align-items:center}.row b{width:84px;font-weight:normal}"
        "svg{flex:1;height:22px;background:#f2f2f2;margin:1px 0}</style></head><body>"
        f"<h1>{html.escape(heading)}</h1>" + "\n".join(rows) + "</body></html>\n"
    )


def _svg_row(lane: str, spans: Sequence[Span], length_ms: float) -> str:
    bars = "".join(
        f"<rect x='{100 * span.start_ms / length_ms:.4f}%' y='2' height='18' "
        f"width='{max(100 * (span.end_ms - span.start_ms) / length_ms, 0.02):.4f}%' "
        f"fill='{COLOURS[lane]}'><title>{html.escape(span.name)}: "
        f"{span.end_ms - span.start_ms:.3f} ms from {span.start_ms:.3f}</title></rect>"
        for span in spans
    )
    return f"<div class='row'><b>{lane}</b><svg>{bars}</svg></div>"
