import io
import json

import pytest
from rich.console import Console

from sidestream.training import doctor
from sidestream.training.diagnostics import Check
from sidestream.training.doctor import run_doctor, table_of, verdict

GOOD = Check("torch", "ok", "2.13.0")
WARNED = Check("CUDA_DEVICE_MAX_CONNECTIONS", "warning", "1", "unset it")
BROKEN = Check("gloo", "error", "missing", "install [x]")


@pytest.mark.parametrize(
    ("checks", "code", "sentence"),
    [
        ([GOOD], 0, "Training will run."),
        ([GOOD, WARNED], 0, "Training will run; look at: CUDA_DEVICE_MAX_CONNECTIONS."),
        ([WARNED, BROKEN], 1, "Training will not run: gloo."),
    ],
    ids=["good", "warned", "broken"],
)
def test_only_errors_fail(checks, code, sentence, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "collect", lambda: tuple(checks))
    assert verdict(checks) == sentence
    assert run_doctor(as_json=True) == code
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == [
        c.name for c in checks
    ]
    assert run_doctor() == code
    assert sentence in capsys.readouterr().out


def test_table_shows_what_was_found_and_the_fix():
    console = Console(file=io.StringIO(), width=100)
    console.print(table_of([GOOD, WARNED, BROKEN]))
    shown = console.file.getvalue()
    assert "2.13.0" in shown
    assert "fix: unset it" in shown
    # Brackets are shown, not taken for markup.
    assert "fix: install [x]" in shown
