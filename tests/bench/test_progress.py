"""How far something long is: what a terminal shows, and what a file."""

import pytest

from sidestream.bench import progress


def take_for_a_terminal(monkeypatch):
    """The error output of now: that of a fixture is another one."""
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")


def test_of_a_known_number_a_file_gets_some_lines(capsys):
    with progress.shown(100, "compiled") as step:
        for number in range(100):
            step(f"case {number}")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "compiled 100/100: case 99"


def test_of_a_known_number_a_terminal_shows_a_bar(capsys, monkeypatch):
    take_for_a_terminal(monkeypatch)
    with progress.shown(2, "compiled") as step:
        step("[bold]a[/bold]")
        step("b")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "2/2" in printed.err
    assert "2/2: b" not in printed.err


def test_of_an_unknown_number_a_file_gets_nothing(capsys):
    with progress.line() as tell:
        tell("checking a")
    assert tuple(capsys.readouterr()) == ("", "")


def test_of_an_unknown_number_a_terminal_shows_one_line_until_the_end(capsys, monkeypatch):
    take_for_a_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), progress.line() as tell:
        tell("checking a")
        tell("timing a")
        raise KeyboardInterrupt
    clear = "\r\x1b[K"
    assert tuple(capsys.readouterr()) == ("", f"{clear}checking a{clear}timing a{clear}")
