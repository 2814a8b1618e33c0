"""Owns how the page looks: its colours, in the light and in the dark, and its style sheet.

Figures are drawn in the colours of the light, which `svg` replaces by the names of `COLOURS`, so
that the reader's setting decides. The hues of series stay apart for the colour-blind (Okabe and
Ito, "Color Universal Design", 2008; darker here for lines on white); each has a marker besides.
"""

from __future__ import annotations

from collections.abc import Mapping

COLOURS: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#1b2026", "#e8ecf0"),
    "faint": ("#5a6572", "#9aa6b2"),
    "grid": ("#dfe4ea", "#2f3740"),
    "good": ("#00664a", "#5cd6ab"),
    "bad": ("#a83200", "#ff9a6b"),
    "series-0": ("#0064ad", "#56b4f5"),
    "series-1": ("#c94f00", "#ff8f4d"),
    "series-2": ("#008261", "#2fc79b"),
    "series-3": ("#b0528c", "#eb9fcb"),
    "series-4": ("#a37200", "#e9bd45"),
    "series-5": ("#5b4bc4", "#afa2ff"),
}
"""Name -> (in the light, in the dark)."""
SERIES = tuple(name for name in COLOURS if name.startswith("series-"))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SIGNS = ("\u25cf", "\u25a0", "\u25b2", "\u25c6", "\u25bc", "\u271a", "\u2716")
"""The markers as text, for legends."""


def light(name: str) -> str:
    """A colour to draw with."""
    return COLOURS[name][0]


def series_name(number: int) -> str:
    """The colour of candidate `number`."""
    return SERIES[number % len(SERIES)]


def marker(number: int) -> str:
    """matplotlib's marker of candidate `number`."""
    return MARKERS[number % len(MARKERS)]


def sign(number: int) -> str:
    """The same marker as a character."""
    return SIGNS[number % len(SIGNS)]


def style_sheet() -> str:
    """All of it."""
    bright, dark = (
        "".join(f"--{name}:{pair[index]};" for name, pair in COLOURS.items()) for index in (0, 1)
    )
    return (
        f":root{{color-scheme:light dark;--font:{_FONT};{bright}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{_RULES}"
    )


_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif"
_RULES = """\
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 var(--font)}
main{max-width:1240px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:20px;margin:44px 0 4px;padding-top:12px;border-top:1px solid var(--grid)}
h3{font-size:16px;margin:22px 0 2px}
p{margin:6px 0;max-width:80ch}
.faint{color:var(--faint)}
.summary{font-size:17px}
.good{color:var(--good)}.bad{color:var(--bad)}
b.bad,b.good{font-weight:650}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:2px 18px;margin:16px 0}
dt{color:var(--faint)}
dd{margin:0;overflow-wrap:anywhere}
code,dd code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
.blocks{display:grid;grid-template-columns:minmax(0,1fr);gap:6px 20px;align-items:start}
.figures{display:grid;gap:10px 20px;margin:6px 0;
 grid-template-columns:repeat(auto-fill,minmax(min(100%,310px),1fr))}
.wide .figures{grid-template-columns:minmax(0,1fr)}
figure{margin:0;min-width:0;max-width:460px}
.wide figure{max-width:680px}
svg{display:block;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin:4px 0;padding:0;list-style:none;
 font-size:13.5px}
.legend i{font-style:normal;display:inline-block;width:1.4em}
.scroll{overflow-x:auto;margin:10px 0}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:2px 12px 2px 0;text-align:right;white-space:nowrap}
th{color:var(--faint);font-weight:500;border-bottom:1px solid var(--grid)}
.text{text-align:left}
tbody tr.first td{border-top:1px solid var(--grid)}
tbody tr.ours td{font-weight:600}
tbody th{padding-top:16px;color:var(--ink);font-weight:650}
details{margin:10px 0}summary{cursor:pointer;color:var(--faint)}
ul{margin:6px 0;padding-left:20px}li{overflow-wrap:anywhere}
@media (min-width:680px){.blocks{grid-template-columns:repeat(2,minmax(0,1fr))}
 .two,.three,.wide{grid-column:span 2}}
@media (min-width:1080px){.blocks{grid-template-columns:repeat(6,minmax(0,1fr))}
 .one{grid-column:span 2}.two{grid-column:span 4}.three{grid-column:span 6}
 .wide{grid-column:span 3}}
@media (max-width:760px){main{padding:18px 14px 48px}h1{font-size:22px}}
"""
