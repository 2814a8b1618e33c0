"""One page on a measurement of kernels: curves, bars, roofline and table, from a report alone.

    series     rows -> what a figure compares: one case's candidates, by size
    roofline   rows, instructions -> points and roofs
    svg        a matplotlib figure -> an inlined one
    figures    series, points -> figures
    page       all of these -> page.html, filled; page.css is its style sheet, and the colours
    build      a report and a path -> the file; checks first, and compiles for the roofline

Only `svg` and `figures` know matplotlib and `page` Jinja, the extra `sidestream[report]`. The same
report makes the same bytes.
"""
