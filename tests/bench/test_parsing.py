"""Types of arguments that the benches' commands share: what they take, and what they refuse."""

import argparse

import pytest

from sidestream.bench.commands.parsing import count, counts, names_of, rate, rates, size, sizes
from sidestream.cli import main

KNOWN = names_of(["ddp", "fsdp2"])


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (count, "4", 4),
        (counts, "8,2,8", (2, 8)),
        (size, "64k", 65536),
        (sizes, "1M,16,1M", (1 << 20, 16)),
        (rate, "2.5Gbit", 2_500_000_000),
        (rates, "1gbit,1500kbit,1000mbit", (1_000_000_000, 1_500_000)),
        (KNOWN, "fsdp2,ddp", ("fsdp2", "ddp")),
    ],
    ids=["count", "counts", "size", "sizes", "rate", "rates", "names"],
)
def test_what_they_take(parse, text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((count, text) for text in ("0", "-1", "few", "1.5")),
        *((counts, text) for text in ("10,0", "eight")),
        *((sizes, text) for text in ("0", "-1", "1.5M", "ten", "", "1M,", "9999999999999G")),
        *((rate, text) for text in ("250", "mbit", "0mbit", "-1mbit", "999kbit", "1 gbit", "")),
        *((rate, text) for text in ("1tbit", "1e3mbit", "nanmbit", "101gbit", "1.mbit", "8MB")),
        (rates, "1gbit,"),
        (KNOWN, "ddp,horovod"),
    ],
)
def test_what_they_refuse_and_say(parse, text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected .*, got .*; "):
        parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("step --against ddp,horovod", "got horovod"),
        ("step --world 0", "got '0'"),
        ("host --candidates plain,zero9", "got zero9"),
        ("host --units 10,0", "got '0'"),
        ("overlap --candidates zero3,ddp", "got ddp"),
        ("kernels --numel 1.5M", "expected a number from 1 to"),
        ("network --rate 250", "expected a rate from 1mbit to 100gbit, got '250'"),
        ("network --ranks 1,2", "expected 2 to 64 ranks, got '1,2'"),
        ("network --trainers fsdp2,mxfp8", "got 'mxfp8'; pass such as"),
        ("network --trainers mxfp8/mxfp4", "got 'mxfp8/mxfp4'; pass such as"),
    ],
)
def test_commands_end_with_a_usage_error(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
