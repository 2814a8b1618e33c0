"""Types of arguments that the benches' commands share: what they take, and what they refuse."""

import argparse
import importlib

import pytest

from sidestream.bench.commands.network import link_rates
from sidestream.bench.commands.parsing import (
    count,
    counts,
    names_of,
    rate,
    rates,
    size,
    sizes,
    trainers_of,
)
from sidestream.cli import main

KNOWN = names_of(["ddp", "fsdp2"])
TRAINERS = trainers_of(["ddp", "fsdp2"])


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (count, "4", 4),
        (counts, "8,2,8", (2, 8)),
        (size, "64k", 65536),
        (sizes, "1M,16,1M", (1 << 20, 16)),
        (link_rates, "2.5gbit,1500kbit,2500mbit", (2_500_000_000, 1_500_000)),
        (KNOWN, "fsdp2,ddp", ("fsdp2", "ddp")),
        (TRAINERS, "nvfp4/mxfp8,ddp,ddp", ("nvfp4/mxfp8", "ddp")),
    ],
    ids=["count", "counts", "size", "sizes", "link rates", "names", "trainers"],
)
def test_what_they_take(parse, text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "gb_per_s", "said"),
    [
        ("400gbit", 50.0, "50 GB/s (400gbit)"),
        ("250mbit", 0.03125, "0.03125 GB/s (250mbit)"),
        ("1.6tbit", 200.0, "200 GB/s (1.6tbit)"),
        ("3TB/s", 3000.0, "3000 GB/s"),
    ],
)
def test_rates_are_bits_or_bytes_a_second(text, gb_per_s, said):
    found = rate(text)
    assert (found.gb_per_s, str(found)) == (pytest.approx(gb_per_s), said)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((count, text) for text in ("0", "-1", "few", "1.5")),
        *((counts, text) for text in ("10,0", "eight")),
        *((sizes, text) for text in ("0", "-1", "1.5M", "ten", "", "1M,", "9999999999999G")),
        *((rate, text) for text in ("250", "mbit", "0mbit", "-1mbit", "1 gbit", "", "1Gbit")),
        *((rate, text) for text in ("1e3mbit", "nanmbit", "1.mbit", "8MB", "8mB/s", "400gbps")),
        *((link_rates, text) for text in ("999kbit", "1tbit", "101gbit", "1gbit,1kbit")),
        (rates, "1gbit,"),
        (KNOWN, "ddp,horovod"),
        *((TRAINERS, text) for text in ("horovod", "mxfp8", "mxfp8/", "/mxfp8", "mxfp8/mxfp4")),
        *((TRAINERS, text) for text in ("bf16/fp5", "mxfp8/mxfp8/mxfp8", "default/bf16", "")),
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
        (
            "network --rate 250",
            "expected a rate, got '250'; write a positive number with one of kbit,",
        ),
        ("network --rate 1kbit", "expected rates from 1mbit to 100gbit, got '1kbit'"),
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


@pytest.mark.parametrize("name", ["step", "network", "convergence"])
def test_help_keeps_the_lines_of_examples(name, capsys):
    with pytest.raises(SystemExit):
        main(["bench", name, "--help"])
    module = importlib.import_module(f"sidestream.bench.commands.{name}")
    examples = [line for line in module.__doc__.splitlines() if line.startswith("    ")]
    assert examples and set(examples) <= set(capsys.readouterr().out.splitlines())
