"""The page of a report: what stands on it, in which order, that it loads nothing."""

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from sidestream import cli
from sidestream.bench import kernel_table
from sidestream.bench.ahead import measuring
from sidestream.bench.kernel_table import Pace
from sidestream.bench.report import build, look
from sidestream.bench.report.series import groups_of, styles_of
from sidestream.bench.reports import read_report, write_text
from sidestream.kernels import registry
from sidestream.tests.bench.report_samples import (
    COMMAND,
    SIZES,
    compiled,
    cpu_report,
    page_of,
    report_of,
)

pytest.importorskip("matplotlib", reason="draws the figures: sidestream[report]")

from sidestream.bench.report.figures import bars, curve
from sidestream.bench.report.page import as_html

OPS = ("pack_", "quantize_mx_")
CLOSED = ("br", "hr", "img", "input", "link", "meta")
REFERENCES = ("src", "href", "srcset", "data", "action", "poster", "xlink:href")


class Page(HTMLParser):
    """The elements of a page, and the ones that were not closed in their order."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.open = []
        self.wrong = []
        self.texts = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in CLOSED:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def gpu_page():
    return page_of(report_of(*OPS, wrong=("cast: not the bits",), notes=("a note",)))


def test_it_is_well_formed_and_loads_nothing(gpu_page):
    page = Page(gpu_page)
    assert (page.open, page.wrong) == ([], [])
    tags = {tag for tag, _ in page.elements}
    assert {"svg", "table", "style", "title"} <= tags
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "image", "base"}
    for tag, attributes in page.elements:
        for name in REFERENCES:
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "http" not in gpu_page
    assert "@import" not in gpu_page
    assert set(re.findall(r"url\((.)", gpu_page)) == {"#"}


def test_names_in_figures_are_one_figure_s_and_all_are_there(gpu_page):
    page = Page(gpu_page)
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names)) > 100
    used = {attributes["href"][1:] for _, attributes in page.elements if "href" in attributes}
    used |= set(re.findall(r"url\(#([^)]+)\)", gpu_page))
    assert len(used) > 10
    assert used <= set(names)


def test_colours_are_the_reader_s_and_fonts_the_page_s(gpu_page):
    figures = "".join(re.findall(r"<svg.*?</svg>", gpu_page, re.DOTALL))
    assert "var(--series-0)" in figures
    assert "var(--ink)" in figures
    assert not re.search(r"#[0-9a-f]{6}", figures)
    assert "DejaVu" not in figures
    names = set(re.findall(r"var\(--([\w-]+)\)", gpu_page))
    assert names <= {*look.COLOURS, "font"}


def test_the_order_of_the_parts(gpu_page):
    heads = re.findall(r"<h[12][^>]*>(.*?)</h[12]>", gpu_page)
    assert heads == [
        "Kernels on NVIDIA H200",
        "Bandwidth",
        "Roofline of this H200",
        "Rivals",
        "Notes",
        "Wrong, so not timed",
    ]
    assert gpu_page.index("2026-01-02") < gpu_page.index("class='summary'")
    assert gpu_page.index("class='summary'") < gpu_page.index("<dl>")
    facts = gpu_page[gpu_page.index("<dl>") : gpu_page.index("</dl>")]
    for text in ("2.13.0", "3.7.1", "min_rounds 5", "--html &#x27;a page.html&#x27;"):
        assert text in facts
    assert "cast: not the bits" in gpu_page[gpu_page.index("Wrong, so") :]
    assert "a note" in gpu_page[gpu_page.index("Notes") :]


def test_every_row_s_numbers_stand_in_its_line(gpu_page):
    report = report_of(*OPS)
    lines = re.findall(r"<tr class='([^']*)'>(.*?)</tr>", gpu_page)
    assert len(lines) == len(report.rows)
    for row, (kind, line) in zip(report.rows, lines, strict=True):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", line)
        assert cells[2:7] == [
            row.candidate,
            f"{row.median_us:.1f}",
            f"[{row.low_us:.1f}, {row.high_us:.1f}]",
            f"{row.gb_per_s:.2f}",
            f"{row.copy_gb_per_s:.2f}",
        ]
        assert ("ours" in kind) == (row.candidate == "sidestream")
        if "first" in kind:
            assert cells[:2] == [row.case.replace(">", "&gt;"), str(row.numel)]
        below = row.target is not None and row.percent_of_copy < row.target
        assert cells[7] == f"{row.percent_of_copy:.1f}" + " \u25bc" * below
        assert ("class='bad'" in line, "class='good'" in line) == (
            below,
            row.target is not None and not below,
        )


def test_the_summary_counts():
    report = report_of("hadamard16", "cast_")
    ours = [row for row in report.rows if row.target and row.numel == SIZES[-1]]
    below = sum(row.percent_of_copy < row.target for row in ours)
    assert 0 < below < len(ours)
    text = page_of(replace(report, wrong=("x", "y")))
    summary = re.search(r"class='summary'>(.*?)</p>", text)[1]
    assert f"{len(ours)} cases timed at 256K to 64M elements" in summary
    assert f"{below} of {len(ours)} below target at the largest size" in summary
    assert "2 wrong" in summary


def _labels(text):
    return re.findall(r"aria-label=\"([^\"]*)\"", text)


def test_many_sizes_are_curves_and_one_is_a_bar():
    report = report_of("pack_")
    cases = list(dict.fromkeys(row.case for row in report.rows))
    labels = _labels(page_of(report))
    for case in cases:
        assert (
            sum(label.startswith(f"{case.replace('>', '&gt;')}, GB/s by") for label in labels) == 1
        )
    assert not any("% of a copy" in label for label in labels)
    one = report_of("pack_", numels=SIZES[:1])
    labels = [label for label in _labels(page_of(one)) if "Roofline" not in label]
    assert len(labels) == 1
    assert all(f"{row.candidate} {row.percent_of_copy:.0f}" in labels[0] for row in one.rows)
    # What fitted at one size alone.
    mixed = replace(report, rows=tuple(
        row for row in report.rows if row.case != cases[0] or row.numel == report.rows[0].numel
    ))  # fmt: skip
    labels = [label for label in _labels(page_of(mixed)) if "Roofline" not in label]
    assert [label.startswith("% of") for label in labels] == [False] * (len(cases) - 1) + [True]


def _texts(svg):
    return re.findall(r"<text[^>]*>(.*?)</text>", svg)


@pytest.mark.parametrize(("factor", "logarithmic"), [(1, False), (2, False), (50, True)])
def test_rates_that_would_lie_on_the_axis_have_a_logarithmic_one(factor, logarithmic):
    rows = [row for row in report_of("hadamard16").rows if row.case == "hadamard16 bf16"]
    slow = [replace(row, gb_per_s=row.gb_per_s / factor) for row in rows]
    (group,) = groups_of(slow)
    ticks = set(_texts(curve(group, styles_of([group]), "c")))
    assert ("0" in ticks) != logarithmic
    assert ({"10", "100"} <= ticks) == logarithmic


@pytest.mark.parametrize("numels", [SIZES[:1], SIZES], ids=["bars", "curves"])
def test_a_size_measured_twice_is_drawn_as_it_was_first(numels):
    once = report_of("hadamard16", numels=numels)
    again = tuple(replace(row, gb_per_s=1.0, percent_of_copy=1.0) for row in once.rows)
    twice = replace(once, rows=once.rows + again)
    figures = (_labels(page_of(report))[0] for report in (once, twice))
    assert next(figures) == next(figures)


def test_bars_are_named_and_marked_where_they_should_be():
    (group,) = groups_of(report_of("hadamard16", numels=SIZES[-1:]).rows)
    ours, rival = group.rows
    svg = bars([group], styles_of([group]), "b")
    texts = _texts(svg)
    assert texts.index("sidestream") < texts.index("torch.mm")
    assert f"{ours.percent_of_copy:.0f} %" in texts
    assert f"{rival.percent_of_copy:.0f} %" in texts
    assert f"{group.case.replace('>', '&gt;')}, 64M" in texts
    untargeted = [replace(row, target_percent=None) for row in group.rows]
    lines = bars(groups_of(untargeted), styles_of([group]), "b").count("stroke-width: 2.4")
    assert svg.count("stroke-width: 2.4") == lines + 1


def test_a_cpu_s_report_has_no_targets_and_a_predicted_roofline():
    text = page_of(cpu_report(*OPS))
    assert "Roofline, predicted for one H100" in text
    assert "below target" not in text
    assert "class='bad'" not in text
    assert "targets are for GPUs only" in text
    assert "measured, GB/s" not in text


def test_a_gpu_s_roofline_names_what_was_measured(gpu_page):
    table = gpu_page[gpu_page.index("<details>") : gpu_page.index("</details>")]
    case = ("quantize_mx e4m3 bf16", "sidestream")
    measured = [row for row in report_of(*OPS).rows if (row.case, row.candidate) == case]
    assert "measured, GB/s" in table
    assert f"<td>{measured[-1].gb_per_s:.2f}</td>" in table
    assert f"<td>{measured[0].gb_per_s:.2f}</td>" not in table
    assert "not one kernel of those that are compiled" in gpu_page


def test_what_others_named_is_escaped():
    device, sneaky = "NVIDIA <i2>H200</i2> & 'co' \"x\"", "<script>$x_1$</script>"
    report = cpu_report("hadamard16", machine={"device": device}, notes=(sneaky,), wrong=(sneaky,))
    rows = [replace(row, case=sneaky, candidate=f"{row.candidate}<i2>") for row in report.rows]
    text = page_of(replace(report, rows=tuple(rows), command=sneaky))
    page = Page(text)
    assert (page.open, page.wrong) == ([], [])
    assert not {tag for tag, _ in page.elements} & {"script", "i2"}
    assert any(device in part for part in page.texts)
    assert "&lt;script&gt;$x_1$&lt;/script&gt;" in _texts(text)


def test_the_same_report_is_the_same_page(gpu_page):
    assert page_of(report_of(*OPS, wrong=("cast: not the bits",), notes=("a note",))) == gpu_page


def test_what_the_user_set_for_matplotlib_changes_nothing(gpu_page):
    import matplotlib

    with matplotlib.rc_context({"font.size": 31, "axes.linewidth": 9, "svg.fonttype": "path"}):
        page = page_of(report_of(*OPS, wrong=("cast: not the bits",), notes=("a note",)))
        assert matplotlib.rcParams["font.size"] == 31
    assert page == gpu_page


def test_a_report_without_rows_is_a_page():
    text = as_html(cpu_report("hadamard16", rows=(), wrong=("all of it",)), build.roofline(
        cpu_report("hadamard16", rows=())
    ))  # fmt: skip
    assert "Nothing was timed" in text
    assert "all of it" in text
    assert Page(text).open == []


@pytest.fixture
def _not_compiled(monkeypatch):
    def measured(tasks, num_processes, on_row):
        rows = compiled(*{op for op, _, _ in tasks}, target=tasks[0][2])
        for row in rows:
            on_row(row)
        return rows

    monkeypatch.setattr(measuring, "measure_all", measured)


@pytest.mark.usefixtures("_not_compiled")
def test_the_command_makes_the_page_of_a_file(tmp_path, capsys):
    report = report_of("hadamard16")
    write_text(tmp_path / "r.json", report.as_json())
    arguments = ["bench", "report", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert cli.main(arguments) == 0
    assert (tmp_path / "r.html").read_text() == page_of(report)
    assert "compiled 2/2: hadamard16_ inverse fp32 sm_90" in capsys.readouterr().err


@pytest.mark.usefixtures("_not_compiled")
def test_bench_kernels_makes_the_same_page(tmp_path, monkeypatch):
    pace = Pace(passes=1, min_rounds=3, max_rounds=3, seconds=0.0, sample_s=0.0)
    monkeypatch.setattr(kernel_table, "CPU_PACE", pace)
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert cli.main([*COMMAND, *files]) == 0
    report = read_report(tmp_path / "r.json")
    assert (tmp_path / "r.html").read_text() == page_of(report)
    assert len(_labels(page_of(report))) == 2


def test_kernels_are_compiled_for_the_gpu_of_the_report(monkeypatch):
    asked = []
    monkeypatch.setattr(
        measuring, "measure_all", lambda tasks, *_: asked.extend(tasks) or compiled("hadamard16_")
    )
    found = build.roofline(report_of("hadamard16", device="NVIDIA B200"))
    assert found.gpu.name == "B200"
    assert asked == [("hadamard16_", name, "sm_100") for name in ("forward bf16", "inverse fp32")]


def test_points_are_of_what_the_compiler_made():
    found = build.roofline(report_of("hadamard16"))
    assert [point.case for point in found.points] == ["forward bf16", "inverse fp32"]
    for point in found.points:
        limit = registry.gate("hadamard16_", point.case).instructions
        assert 2 < point.instructions <= limit


@pytest.mark.parametrize(
    ("report", "missing", "words"),
    [
        (report_of("hadamard16", device="AMD <MI300X>"), None, "multiprocessors of AMD <MI300X>"),
        (report_of("hadamard16"), "triton", "Triton, which compiles"),
    ],
    ids=["unknown GPU", "no Triton"],
)
def test_why_there_is_no_roofline_is_said(report, missing, words, monkeypatch):
    monkeypatch.setattr(build, "find_spec", lambda name: None if name == missing else name)
    found = build.roofline(report)
    assert words in found
    assert words.replace("<", "&lt;").replace(">", "&gt;") in as_html(report, found)


def test_matplotlib_is_loaded_for_pages_alone():
    """And Triton for rooflines: `bench kernels` and `bench report` have to start without."""

    script = (
        "import sys\nsys.modules.update(matplotlib=None, triton=None)\n"
        "import sidestream.bench.report.build, sidestream.bench.commands.report\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_figures_are_svg():
    text = page_of(report_of("hadamard16"))
    for figure in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        root = ElementTree.fromstring(figure)
        width, height = (float(root.attrib[name]) for name in ("width", "height"))
        assert 300 < width < 640
        assert root.attrib["viewBox"] == f"0 0 {width:g} {height:g}"
