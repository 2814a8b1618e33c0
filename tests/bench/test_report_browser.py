"""The page in a browser, headless: figures are seen, in the light and in the dark; nothing is cut,
overlaps, or makes the page wider than its window.
"""

import functools
import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="draws the figures: sidestream[report]")

from matplotlib import image

from sidestream.tests.bench.report_samples import SIZES, page_of, report_of

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
OPS = ("pack_", "quantize_mx_", "reduce_messages_")
WIDE, NARROW, HEIGHT = 1280, 700, 3200
LIMIT_S = 60
# As JSON in the title: the figures' edges, and the words that leave theirs or lie on another's.
SCRIPT = """<script>
const box = one => one.getBoundingClientRect()
const isInside = (a, b) =>
  a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1
const overlap = (a, b) =>
  Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5 &&
  Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1.5
const faults = svg => [...svg.querySelectorAll("text")].filter((one, at, all) =>
  !isInside(box(one), box(svg)) || all.slice(0, at).some(other => overlap(box(one), box(other))))
const figures = [...document.querySelectorAll("svg")]
document.title = JSON.stringify({
  widths: [innerWidth, document.documentElement.scrollWidth],
  figures: figures.map(svg => box(svg).toJSON()),
  faults: figures.flatMap(faults).map(one => one.textContent),
})
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)}"),
]


@functools.cache
def _made(kind):
    """Curves of two ops and bars of one, or bars of all ops and their rooflines."""
    bars = report_of(*(OPS[2:] if kind == "curves" else ()), numels=SIZES[-1:]).rows
    curves = report_of(*OPS[:2])
    return page_of(replace(curves, rows=curves.rows + bars if kind == "curves" else bars))


def _run(folder, text, width, *options):
    path = folder / "page.html"
    path.write_text(text)
    command = [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'user'}"]
    command += [f"--window-size={width},{HEIGHT}", *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _layout(folder, text, width):
    found = _run(folder, text.replace("</body>", f"{SCRIPT}</body>"), width, "--dump-dom")
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", found, re.DOTALL)[1]))


def _count(pixels, colour):
    wanted = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return int((abs(pixels - wanted).max(-1) < 0.02).sum())


@pytest.mark.parametrize("index", [0, 1], ids=["light", "dark"])
def test_series_are_seen_in_their_figures(index, tmp_path):
    page, file = _made("curves"), tmp_path / "page.png"
    scheme = f"--blink-settings=preferredColorScheme={1 - index}"
    _run(tmp_path, page, WIDE, f"--screenshot={file}", scheme)
    pixels = image.imread(file)[..., :3]
    assert pixels.shape == (HEIGHT, WIDE, 3)
    # The style sheet has those of the light first.
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", page.split("@media")[index]))
    assert _count(pixels[:, :8], colours["paper"]) == 8 * HEIGHT
    figures = [
        pixels[round(box["top"]) : round(box["bottom"]), round(box["left"]) : round(box["right"])]
        for box in _layout(tmp_path, page, WIDE)["figures"]
        if box["bottom"] <= HEIGHT
    ]
    assert len(figures) >= 6
    for figure in figures:
        assert _count(figure, colours["series-0"]) > 20
        assert _count(figure, colours["ink"]) > 15
    rivals = ("series-1", "series-2", "series-3")
    assert all(_count(figures[0], colours[name]) > 40 for name in rivals)


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("kind", ["curves", "bars"])
def test_nothing_is_cut_overlaps_or_is_too_wide(kind, width, tmp_path):
    found = _layout(tmp_path, _made(kind), width)
    assert found["faults"] == []
    window, page = found["widths"]
    assert page <= window == width
    assert len(found["figures"]) >= 10
    assert all(box["left"] >= 0 and box["right"] <= width for box in found["figures"])
