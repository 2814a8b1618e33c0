import pytest

from sidestream.training.schedules.text_plot import BRAILLE, STARS, glyphs_for, plotted


def test_a_line_goes_from_corner_to_corner_without_gaps():
    assert plotted([3, 2, 1, 0], height=1) == ["⠑⢄"]
    assert plotted([0, 0, 7, 7], height=2) == ["⠀⡏", "⣀⠇"]
    assert plotted([0, 2, 4], height=3, glyphs=STARS) == ["  *", " * ", "*  "]


def test_a_constant_is_a_line():
    assert plotted([5.0] * 4, height=2) == ["⠀⠀", "⣀⣀"]


@pytest.mark.parametrize(("values", "height"), [([], 1), ([1.0], 0)], ids=["values", "lines"])
def test_nothing_to_draw_is_refused(values, height):
    with pytest.raises(ValueError, match="expected values and lines"):
        plotted(values, height=height)


def test_braille_is_for_terminals_that_have_it():
    assert glyphs_for("utf-8") is BRAILLE
    assert [glyphs_for(name) for name in ("latin-1", "ascii", None, "nonsense")] == [STARS] * 4
