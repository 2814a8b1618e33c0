"""Made-up reports of real cases, and what the compiler might have said of these."""

from dataclasses import replace

from sidestream.bench.ahead import measuring
from sidestream.bench.kernel_cases.case import OURS
from sidestream.bench.kernel_cases.selection import Selection, select
from sidestream.bench.report.roofline import roofline_of, subject_of
from sidestream.bench.reports import CPU_METHOD, GRAPH_METHOD, Report, Row
from sidestream.kernels import ahead

COPY_GB_PER_S = 4200.0
COLD_BYTES = 64 << 20
SIZES = (1 << 18, 1 << 22, 1 << 26)
COMMAND = ("bench", "kernels", "--device", "cpu", "--op", "hadamard16", "--numel", "16k,64k")
"""A real run that is short."""


def report_of(*ops, numels=SIZES, device="NVIDIA H200", method=GRAPH_METHOD, **fields):
    """Rows of the standard cases of `ops`, or of all, with rates that grow with the size."""
    cases = select(Selection(ops=ops or None))
    rows = [
        row_of(case, numel, name, index, method)
        for case in cases
        for numel in numels
        for index, name in enumerate(case.candidates)
    ]
    report = Report(
        date="2026-01-02T03:04:05+00:00",
        command="sidestream bench kernels --html 'a page.html'",
        machine={
            "device": device,
            "threads": None,
            "torch": "2.13.0",
            "triton": "3.7.1",
            "commit": "0123abc",
        },
        settings={"passes": 1, "min_rounds": 5},
        rows=tuple(rows),
    )
    return replace(report, **fields)


def cpu_report(*ops, **fields):
    """The same as if on a CPU."""
    return report_of(*ops, **{"device": "a CPU", "method": CPU_METHOD, **fields})


def row_of(case, numel, name=OURS, index=0, method=GRAPH_METHOD):
    """One row of a case; `index`: of the candidate."""
    num_bytes = case.num_bytes(numel)
    # Launching takes a time of its own; some kernels reach their target and some do not.
    copy_us = num_bytes / COPY_GB_PER_S / 1e3 + 3.0
    target = (case.target or 0.9) * (1.03 if len(case.name) % 3 else 0.93)
    share = target if name == OURS else target * (0.95 - 0.13 * index)
    median = copy_us / share + 0.7
    return Row(
        case=case.name,
        op=case.op,
        format=case.format,
        dtype=case.dtype,
        world=case.world,
        numel=case.numel(numel),
        num_bytes=num_bytes,
        candidate=name,
        median_us=median,
        low_us=0.96 * median,
        high_us=1.07 * median,
        num_samples=25,
        gb_per_s=num_bytes / median / 1e3,
        copy_gb_per_s=num_bytes / copy_us / 1e3,
        percent_of_copy=100 * copy_us / median,
        target_percent=100 * case.target if name == OURS and case.target else None,
        method=method,
        rotated=4,
        cold=num_bytes >= COLD_BYTES,
    )


def page_of(report):
    """Its page, with the roofline of its GPU and of `compiled`."""
    from sidestream.bench.report.page import as_html  # draws, so it needs matplotlib

    ops = {row.op for row in report.rows}
    return as_html(report, roofline_of(report, subject_of(report), compiled(*ops)))


def compiled(*ops, target="sm_90"):
    """Rows of the cases compiled ahead, each with the most that its gate allows, if it has one."""
    return [
        measuring.Row(
            op=case.op,
            case=case.name,
            target=target,
            registers=32,
            register_limit=None,
            spill_bytes=0,
            shared_bytes=0,
            occupancy=1.0,
            load_bits=(128,),
            store_bits=(128,),
            instructions=_instructions(case),
            instruction_limit=None,
            moved_bytes=case.moved_bytes,
            predictions=(),
        )
        for case in ahead.cases()
        if not ops or case.op in ops
    ]


def _instructions(case):
    if case.gate is None:
        return None
    return case.gate.instructions or 1.2 * case.moved_bytes
