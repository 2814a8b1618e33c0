"""One page on a measurement of kernels: curves, bars, roofline and table, from a report alone.

    series     rows -> what a figure compares: one case's candidates, by size
    matches    a row's case -> the case that is compiled ahead of time for it
    roofline   rows, instructions -> points and roofs
    look       colours, in the light and in the dark, and the style sheet
    svg        a matplotlib figure -> an inlined one
    figures    series, points -> figures
    tables     rows -> tables
    page       all of these -> the page
    build      a report and a path -> the file; checks first, and compiles for the roofline

Only `svg` and `figures` know matplotlib, which is the extra `sidestream[report]`. The same report
makes the same bytes.
"""
