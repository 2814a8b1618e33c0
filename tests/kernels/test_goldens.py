"""The bits of every public op, as they were when `goldens.json` was written."""

import json

import pytest

from sidestream.tests.kernels import goldens

CALLS, STORED = goldens.calls(), json.loads(goldens.FILE.read_text())


def test_every_call_has_a_hash():
    assert list(CALLS) == list(STORED)


@pytest.mark.parametrize("family", dict.fromkeys(name.split()[0] for name in CALLS))
def test_bits_are_those_that_users_have(family):
    changed = [
        name
        for name, call in CALLS.items()
        if name.split()[0] == family and goldens.digest(call()) != STORED[name]
    ]
    assert not changed
