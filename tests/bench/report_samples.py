"""Made-up reports of real cases, and what the compiler might have said of these."""

from dataclasses import replace

from sidestream.bench.report.roofline import cases_of, roofline_of, subject_of
from sidestream.bench.reports import CPU_METHOD, GRAPH_METHOD, Report, Row
from sidestream.kernels.cases import cases

COPY_GB_PER_S = 4200.0
COLD_BYTES = 64 << 20
SIZES = (1 << 18, 1 << 22, 1 << 26)
OURS, *RIVALS = ("sidestream", "torch.compile", "torchao", "TransformerEngine")
COMMAND = ("bench", "kernels", "--device", "cpu", "--op", "hadamard16", "--numel", "16k,64k")
"""A real run that is short."""


def report_of(*ops, numels=SIZES, device="NVIDIA H200", method=GRAPH_METHOD, **fields):
    """Rows of the standard cases of `ops`, or of all, with rates that grow with the size."""
    rows = [
        _row(case, numel, index, method)
        for case in cases()
        if case.standard and (not ops or case.op in ops)
        for numel in numels
        for index in range(2 + len(case.op) % 3)
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


def _row(case, numel, index, method):
    """One row of a case; `index`: of the candidate, 0 for ours."""
    num_bytes = case.num_bytes(numel)
    # Launching takes a time of its own; some kernels reach their target and some do not.
    copy_us = num_bytes / COPY_GB_PER_S / 1e3 + 3.0
    share = (case.copy_share or 0.9) * (1.03 if len(case.full_name) % 3 else 0.93)
    median = copy_us / (share * (1.0, 0.82, 0.69, 0.56)[index]) + 0.7
    return Row(
        case=case.full_name,
        op=case.op,
        format=case.format,
        dtype=case.dtype,
        world=case.world,
        numel=case.numel(numel),
        num_bytes=num_bytes,
        candidate=(OURS, *RIVALS)[index],
        median_us=median,
        low_us=0.96 * median,
        high_us=1.07 * median,
        num_samples=25,
        gb_per_s=num_bytes / median / 1e3,
        copy_gb_per_s=num_bytes / copy_us / 1e3,
        percent_of_copy=100 * copy_us / median,
        target_percent=100 * case.copy_share if index == 0 and case.copy_share else None,
        method=method,
        rotated=4,
        cold=num_bytes >= COLD_BYTES,
    )


def roofline_made_up(report):
    """Of its GPU, where every case takes the most that its gate allows."""
    counted = [(case, _instructions(case), 0.0) for case in cases_of(report)]
    return roofline_of(report, subject_of(report), counted)


def _instructions(case):
    if case.count is None:
        return None
    return (case.gate and case.gate.instructions) or 1.2 * case.moved_bytes


def page_of(report):
    """Its page, with that roofline."""
    from sidestream.bench.report.page import as_html  # draws, so it needs matplotlib

    return as_html(report, roofline_made_up(report))
