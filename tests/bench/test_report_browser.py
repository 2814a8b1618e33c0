"""The page in a browser, headless: figures are seen, in the light and in the dark; nothing is cut,
overlaps, or makes the page wider than its window.
"""

import functools
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="draws the figures: sidestream[report]")

from matplotlib import image

from sidestream.bench.report.look import COLOURS
from sidestream.tests.bench.report_samples import SIZES, page_of, report_of

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
OPS = ("pack_", "quantize_mx_", "reduce_messages_")
WIDE, NARROW, HEIGHT = 1280, 700, 3200
LIMIT_S = 60
# Where everything is, as JSON in the title: an element's left, top, right and bottom.
SCRIPT = """<script>
const box = one => {
  const found = one.getBoundingClientRect()
  return [found.left, found.top, found.right, found.bottom]
}
const texts = svg => [...svg.querySelectorAll("text")].map(one => [one.textContent, ...box(one)])
document.title = JSON.stringify({
  window: innerWidth, page: document.documentElement.scrollWidth,
  figures: [...document.querySelectorAll("svg")].map(svg => ({box: box(svg), texts: texts(svg)}))
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
    title = re.search(r"<title>(.*?)</title>", found, re.DOTALL)[1]
    return json.loads(title.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


def _shot(folder, text, width, scheme):
    file = folder / "page.png"
    options = (f"--screenshot={file}", f"--blink-settings=preferredColorScheme={scheme}")
    _run(folder, text, width, *options)
    return image.imread(file)[..., :3]


def _count(pixels, colour):
    wanted = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return int((abs(pixels - wanted).max(-1) < 0.02).sum())


@pytest.mark.parametrize("index", [0, 1], ids=["light", "dark"])
def test_series_are_seen_in_their_figures(index, tmp_path):
    page = _made("curves")
    figures = _layout(tmp_path, page, WIDE)["figures"]
    pixels = _shot(tmp_path, page, WIDE, scheme=1 - index)
    assert pixels.shape == (HEIGHT, WIDE, 3)
    colours = {name: pair[index] for name, pair in COLOURS.items()}
    assert _count(pixels[:, :8], colours["paper"]) == 8 * HEIGHT
    shown = 0
    for figure in figures:
        left, top, right, bottom = (round(edge) for edge in figure["box"])
        if bottom <= HEIGHT:
            inside = pixels[top:bottom, left:right]
            assert _count(inside, colours["series-0"]) > 20, figure["texts"]
            assert _count(inside, colours["ink"]) > 15, figure["texts"]
            shown += 1
    assert shown >= 6
    rivals = ("series-1", "series-2", "series-3")
    left, top, right, bottom = (round(edge) for edge in figures[0]["box"])
    assert all(_count(pixels[top:bottom, left:right], colours[name]) > 40 for name in rivals)


def _overlaps(one, other):
    left, top, right, bottom = (
        chosen(a, b) for chosen, a, b in zip((max, max, min, min), one, other, strict=True)
    )
    return right - left > 1.5 and bottom - top > 1.5


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("kind", ["curves", "bars"])
def test_nothing_is_cut_overlaps_or_is_too_wide(kind, width, tmp_path):
    found = _layout(tmp_path, _made(kind), width)
    assert found["window"] == width
    assert found["page"] <= width
    assert len(found["figures"]) >= 10
    for figure in found["figures"]:
        left, top, right, bottom = figure["box"]
        assert left >= 0
        assert right <= width
        for name, *box in figure["texts"]:
            assert box[0] >= left - 1 and box[2] <= right + 1, (name, box, figure["box"])
            assert box[1] >= top - 1 and box[3] <= bottom + 1, (name, box, figure["box"])
        for index, (name, *box) in enumerate(figure["texts"]):
            for other, *place in figure["texts"][:index]:
                assert not _overlaps(box, place), (name, other)
