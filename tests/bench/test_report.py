"""The page of a report: what stands on it, that it loads nothing, what keeps it from being made."""

import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from sidestream import cli
from sidestream.bench import kernel_table
from sidestream.bench.kernel_table import Pace
from sidestream.bench.report import build
from sidestream.bench.reports import read_report, write_json
from sidestream.kernels.ahead import measure
from sidestream.tests.bench.report_samples import (
    COMMAND,
    SIZES,
    cpu_report,
    page_of,
    report_of,
)

pytest.importorskip("matplotlib", reason="draws the figures: sidestream[report]")

from sidestream.bench.report.page import as_html

OPS = ("pack_", "quantize_mx_")
REPORT = report_of(*OPS, wrong=("cast: not the bits",), notes=("a note",))
REFERENCES = ("src", "href", "srcset", "data", "action", "poster")


def _words(part):
    """What is read in a part of a page, in its order."""
    return [" ".join(text.split()) for text in part.itertext() if text.strip()]


def _figures(text, *, roofline=False):
    """The figures of a page but for the roofline's, or these alone."""
    found = ElementTree.fromstring(text).iter("svg")
    return [svg for svg in found if ("Roofline" in svg.get("aria-label")) == roofline]


def _labels(report):
    return [svg.get("aria-label") for svg in _figures(page_of(report))]


@pytest.fixture(scope="module")
def text():
    return page_of(REPORT)


@pytest.fixture(scope="module")
def page(text):
    return ElementTree.fromstring(text)


def test_it_loads_nothing(text, page):
    tags = {one.tag for one in page.iter()}
    assert {"svg", "table", "style", "title"} <= tags
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "image", "base"}
    for one in page.iter():
        assert all(one.get(name, "#").startswith("#") for name in REFERENCES), one.attrib
        assert not any(name.startswith("on") for name in one.attrib)
    assert "http" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}


def test_what_figures_refer_to_is_theirs_and_there(text, page):
    names = [one.get("id") for one in page.iter() if "id" in one.attrib]
    used = {one.get("href")[1:] for one in page.iter() if "href" in one.attrib}
    assert len(names) == len(set(names)) > 10
    assert used | set(re.findall(r"url\(#([^)]+)\)", text)) == set(names)


def test_colours_are_the_reader_s(page):
    light, dark = (
        set(re.findall(r"--([\w-]+): #", part))
        for part in page.find("head/style").text.split("@media")[:2]
    )
    assert light == dark
    styles = " ".join(one.get("style", "") for svg in page.iter("svg") for one in svg.iter())
    assert "#" not in styles.replace("url(#", "")
    assert {"series-0", "ink"} <= set(re.findall(r"var\(--([\w-]+)\)", styles)) <= light


def test_the_parts_in_their_order(page):
    heads = [one.text for one in page.iter() if one.tag in ("h1", "h2")]
    assert heads == ["Kernels on NVIDIA H200", "Bandwidth", "Roofline of this H200", "Rivals",
                     "Notes", "Wrong, so not timed"]  # fmt: skip
    facts = _words(page.find(".//dl"))
    assert {"date", "2.13.0", "3.7.1", "passes 1, min_rounds 5", REPORT.command} <= set(facts)
    assert "threads" not in facts
    *_, notes, wrong = page.iter("ul")
    assert _words(notes)[0] == "a note"
    assert _words(wrong) == ["cast: not the bits"]


def test_every_row_s_numbers_stand_in_its_line(page):
    lines = [line for line in page.iter("tr") if line.get("class") is not None]
    for row, line in zip(REPORT.rows, lines, strict=True):
        cells = [cell.text or "" for cell in line]
        assert cells[2:7] == [
            row.candidate,
            f"{row.median_us:.1f}",
            f"[{row.low_us:.1f}, {row.high_us:.1f}]",
            f"{row.gb_per_s:.2f}",
            f"{row.copy_gb_per_s:.2f}",
        ]
        kinds = line.get("class").split()
        assert ("ours" in kinds) == (row.candidate == "sidestream")
        assert cells[:2] == ([row.case, str(row.numel)] if "first" in kinds else ["", ""])
        below = row.target is not None and row.percent_of_copy < row.target
        assert cells[7] == f"{row.percent_of_copy:.1f}" + " \u25bc" * below
        assert line[7].get("class") == ("" if row.target is None else "bad" if below else "good")


def test_the_summary_counts():
    report = report_of("hadamard16_", "cast_", wrong=("x", "y"))
    ours = [row for row in report.rows if row.target and row.numel == SIZES[-1]]
    below = sum(row.percent_of_copy < row.target for row in ours)
    assert 0 < below < len(ours)
    summary = ElementTree.fromstring(page_of(report)).find(".//p[@class='summary']")
    assert " ".join("".join(summary.itertext()).split()) == (
        f"{len(ours)} cases timed at 256K to 64M elements; {below} of {len(ours)} below target at "
        "the largest size; 2 wrong."
    )


def test_many_sizes_are_curves_and_one_is_a_bar():
    report = report_of("pack_")
    cases = list(dict.fromkeys(row.case for row in report.rows))
    curves = _labels(report)
    assert [label.partition(", GB/s by elements")[0] for label in curves] == cases
    one = report_of("pack_", numels=SIZES[:1])
    (label,) = _labels(one)
    assert label.startswith("% of a copy's rate")
    assert all(f"{row.candidate} {row.percent_of_copy:.0f}" in label for row in one.rows)
    # What fitted at one size alone is a bar beside the others' curves.
    small = report.rows[0].numel
    rows = [row for row in report.rows if row.case != cases[0] or row.numel == small]
    *first, last = _labels(replace(report, rows=tuple(rows)))
    assert first == curves[1:]
    assert last.startswith(f"% of a copy's rate: {cases[0]} sidestream")


@pytest.mark.parametrize(("factor", "logarithmic"), [(1, False), (2, False), (50, True)])
def test_rates_that_would_lie_on_the_axis_have_a_logarithmic_one(factor, logarithmic):
    report = report_of("hadamard16_")
    slow = tuple(replace(row, gb_per_s=row.gb_per_s / factor) for row in report.rows)
    marks = set(_words(_figures(page_of(replace(report, rows=slow)))[0]))
    assert ("0" in marks) != logarithmic
    assert ({"10", "100"} <= marks) == logarithmic


@pytest.mark.parametrize("numels", [SIZES[:1], SIZES], ids=["bars", "curves"])
def test_a_size_measured_twice_is_drawn_as_it_was_first(numels):
    once = report_of("hadamard16_", numels=numels)
    again = tuple(replace(row, gb_per_s=1.0, percent_of_copy=1.0) for row in once.rows)
    assert _labels(replace(once, rows=once.rows + again)) == _labels(once)


def test_bars_say_whose_they_are_and_how_long():
    report = report_of("hadamard16_", numels=SIZES[-1:])
    words = _words(_figures(page_of(report))[0])
    assert f"{report.rows[0].case}, 64M" in words
    assert words.index("sidestream") < words.index("torch.compile")
    assert {f"{row.percent_of_copy:.0f} %" for row in report.rows} <= set(words)


def test_a_cpu_s_report_has_no_targets_and_a_predicted_roofline():
    text = page_of(cpu_report(*OPS))
    assert "Roofline, predicted for one H100" in text
    assert "below target at" not in text
    assert 'class="bad"' not in text
    assert "targets are for GPUs only" in text
    assert "measured, GB/s" not in text


def test_a_gpu_s_roofline_has_what_was_measured_at_the_largest_size(text, page):
    rows = [row for row in REPORT.rows if row.case == "quantize_mx e4m3 from bf16"]
    small, *_, large = (f"{row.gb_per_s:.2f}" for row in rows if row.candidate == "sidestream")
    words = _words(page.find(".//details"))
    assert {"measured, GB/s", large} <= set(words)
    assert small not in words
    assert any("quantize_mx e4m3" in svg.get("aria-label") for svg in _figures(text, roofline=True))


def test_what_others_named_is_escaped():
    device, sneaky = "NVIDIA <i2>H200</i2> & 'co' \"x\"", "<script>$x_1$ #ffffff</script>"
    report = cpu_report("hadamard16_", machine={"device": device}, notes=(sneaky,), wrong=(sneaky,))
    rows = tuple(replace(row, case=sneaky, candidate="<i2>") for row in report.rows)
    text = page_of(replace(report, rows=rows, command=sneaky))
    page = ElementTree.fromstring(text)
    assert not {one.tag for one in page.iter()} & {"script", "i2"}
    assert f"Kernels on {device}" in _words(page)
    assert _words(page).count(sneaky) > 3
    (figure,) = _figures(text)
    assert figure.get("aria-label").startswith(sneaky)
    assert sneaky in _words(figure)


def test_the_same_report_is_the_same_page_whatever_the_user_set_for_matplotlib(text):
    import matplotlib

    with matplotlib.rc_context({"font.size": 31, "axes.linewidth": 9, "svg.fonttype": "path"}):
        assert page_of(REPORT) == text
        assert matplotlib.rcParams["font.size"] == 31


def test_a_report_without_rows_is_a_page():
    report = cpu_report("hadamard16_", rows=(), wrong=("all of it",))
    words = _words(ElementTree.fromstring(as_html(report, build.roofline(report))))
    assert {"Nothing was timed.", "Nothing was timed, so nothing is drawn.", "all of it"} <= {
        *words
    }


def _made_by(command, folder):
    assert cli.main([*command, "--html", str(folder / "r.html")]) == 0
    return (folder / "r.html").read_text()


def test_the_command_makes_the_page_of_a_file(tmp_path, capsys):
    """With points that are what the compiler made for the GPU of the report."""
    report = report_of("hadamard16_", device="NVIDIA A100-SXM4-80GB")
    write_json(tmp_path / "r.json", report.content())
    text = _made_by(["bench", "report", str(tmp_path / "r.json")], tmp_path)
    assert "of bf16 sm_80" in capsys.readouterr().err
    assert _labels(report) == [svg.get("aria-label") for svg in _figures(text)]
    (roofline,) = _figures(text, roofline=True)
    found = re.findall(r"hadamard16 (of .*?) ([\d.]+)", roofline.get("aria-label"))
    assert "of bf16" in dict(found)
    assert all(0.5 < float(per_byte) < 20 for _, per_byte in found)


def test_bench_kernels_makes_the_page_of_its_report(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "roofline", lambda report: "Not drawn here.")
    pace = Pace(passes=1, min_rounds=3, max_rounds=3, seconds=0.0, sample_s=0.0)
    monkeypatch.setattr(kernel_table, "CPU_PACE", pace)
    text = _made_by([*COMMAND, "--json", str(tmp_path / "r.json")], tmp_path)
    assert text == as_html(read_report(tmp_path / "r.json"), "Not drawn here.")
    assert len(_figures(text)) == 1


@pytest.mark.parametrize(
    ("device", "missing", "words"),
    [
        ("AMD <MI300X>", None, "multiprocessors of AMD <MI300X>"),
        ("NVIDIA H200", "triton", "Triton, which compiles"),
    ],
    ids=["unknown GPU", "no Triton"],
)
def test_why_there_is_no_roofline_is_said(device, missing, words, monkeypatch):
    monkeypatch.setattr(build, "find_spec", lambda name: None if name == missing else name)
    report = report_of("hadamard16_", device=device)
    page = ElementTree.fromstring(as_html(report, build.roofline(report)))
    assert words in " ".join(_words(page))


def test_matplotlib_is_loaded_for_pages_alone():
    """And Triton for rooflines: `bench kernels` and `bench report` have to start without."""
    script = (
        "import sys\nsys.modules.update(matplotlib=None, jinja2=None, triton=None)\n"
        "import sidestream.bench.report.build, sidestream.bench.commands.report\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def _refuse(*arguments, **options):
    raise AssertionError("worked")


@pytest.fixture(params=["kernels", "report"])
def command(request, tmp_path, monkeypatch):
    """Arguments of both commands that make a page, neither of which is to get to work."""
    monkeypatch.setattr(kernel_table, "measure", _refuse)
    monkeypatch.setattr(measure, "measure_all", _refuse)
    write_json(tmp_path / "r.json", report_of("hadamard16_").content())
    return COMMAND if request.param == "kernels" else ("bench", "report", str(tmp_path / "r.json"))


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere/r.html", "make the folder"), ("", "folder"), ("r.json/r.html", "make the folder")],
    ids=["no folder", "folder", "in a file"],
)
def test_a_page_that_cannot_be_written_is_refused(command, name, words, tmp_path, capsys):
    path = str(tmp_path / name)
    assert cli.main([*command, "--html", path]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sidestream: error: ")
    assert all(word in error for word in ("--html", path, words)), error


def test_without_matplotlib_it_says_what_to_install(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    assert cli.main([*command, "--html", str(tmp_path / "r.html")]) == 2
    error = capsys.readouterr().err
    assert "--html: expected matplotlib, got none; pip install 'sidestream[report]'" in error
    assert not (tmp_path / "r.html").exists()


def test_the_page_of_what_is_no_report_is_refused(tmp_path, capsys):
    path = tmp_path / "missing.json"
    assert cli.main(["bench", "report", str(path), "--html", str(tmp_path / "r.html")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
