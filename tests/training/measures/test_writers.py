"""Figures come back as they were given, also after a kill and a resume."""

import json
import math
import os
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from sidestream.tests.ranks import RanksFailed, run_on_ranks
from sidestream.training.errors import UsageError
from sidestream.training.measures import JsonLinesWriter, SeveralWriters, TensorBoardWriter


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics" / "run.jsonl"


def write(path, steps, **options):
    with closing(JsonLinesWriter(path, **options)) as writer:
        for step in steps:
            writer.add_scalar("loss", 1 / step, step)
            writer.add_scalar("lr", 0.5, step)


def forbid(constant):
    raise AssertionError(f"{constant} is not JSON")


def read(path):
    return [json.loads(line, parse_constant=forbid) for line in path.read_text().splitlines()]


def lines_of(steps):
    return [{"step": step, "loss": 1 / step, "lr": 0.5} for step in steps]


def test_a_line_has_the_figures_of_a_step(path):
    write(path, range(1, 4))
    assert read(path) == lines_of(range(1, 4))


def test_figures_are_kept_exactly(path):
    given = {"a": math.pi, "b": math.nan, "c": math.inf, "d": -math.inf, "e": 3, "f": 5e-324}
    with closing(JsonLinesWriter(path)) as writer:
        for tag, value in given.items():
            writer.add_scalar(tag, value, 1)
        writer.add_scalar("g", torch.tensor(0.1), 1)
    (line,) = read(path)
    assert (line["b"], line["c"], line["d"]) == ("nan", "inf", "-inf")
    assert repr({tag: float(line[tag]) for tag in given}) == repr(
        {tag: float(value) for tag, value in given.items()}
    )
    assert type(line["e"]) is int
    assert line["g"] == torch.tensor(0.1).item()


def test_a_second_value_of_a_tag_is_another_line(path):
    with closing(JsonLinesWriter(path)) as writer:
        writer.add_scalar("loss", 1.0, 1)
        writer.add_scalar("loss", 2.0, 1)
        writer.flush()
        writer.flush()
        assert [line["loss"] for line in read(path)] == [1.0, 2.0]
    writer.close()
    with pytest.raises(ValueError, match="expected another name than 'step'"):
        writer.add_scalar("step", 1.0, 1)


def _killed(rank, world_size, path):
    writer = JsonLinesWriter(path)
    for step in range(1, 51):
        writer.add_scalar("loss", 1 / step, step)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_loses_no_whole_step(path):
    with pytest.raises(RanksFailed):
        run_on_ranks(_killed, 1, path, backend=None)
    assert [line["step"] for line in read(path)] == [*range(1, 50)]


@pytest.mark.parametrize("resumed_step", [0, 2, 4, 9])
def test_later_lines_are_dropped(path, resumed_step):
    write(path, range(1, 5))
    write(path, range(resumed_step + 1, resumed_step + 3), resumed_step=resumed_step)
    kept = [step for step in range(1, 5) if step <= resumed_step]
    assert read(path) == lines_of([*kept, resumed_step + 1, resumed_step + 2])
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_wherever_a_kill_tears_the_last_line(path):
    write(path, range(1, 4))
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        write(path, [4], resumed_step=3)
        is_torn = size < len(whole) - 1
        assert read(path) == lines_of([1, 2, 4] if is_torn else [1, 2, 3, 4]), size


def test_zeros_of_a_power_cut_are_a_torn_line(path):
    write(path, [1])
    path.write_bytes(path.read_bytes() + bytes(100))
    write(path, [2], resumed_step=1)
    assert read(path) == lines_of([1, 2])


def test_another_runs_figures_are_not_lost(path):
    write(path, [1])
    with pytest.raises(UsageError, match=r"expected no metrics at .*, got a file of \d+ bytes"):
        JsonLinesWriter(path)
    assert read(path) == lines_of([1])
    path.write_text("")
    write(path, [1])
    assert read(path) == lines_of([1])


@pytest.mark.parametrize("line", ["what", "[1]", "7", "null", '{"loss": 1}', '{"step": "1"}'])
def test_what_it_did_not_write_is_refused(path, line):
    path.parent.mkdir()
    text = f'{{"step": 1}}\n{line}\n{{"step": 2}}\n'
    path.write_text(text)
    with pytest.raises(UsageError, match=r"expected line 2 of .* whole 'step', got"):
        JsonLinesWriter(path, resumed_step=1)
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"expected a file for metrics at .*file/below, got"):
        JsonLinesWriter(tmp_path / "file" / "below")
    with (
        pytest.raises(OSError, match=r"No space left on device: '/dev/full'"),
        closing(JsonLinesWriter("/dev/full")) as writer,
    ):
        writer.add_scalar("loss", 1.0, 1)


def test_a_link_stays_one(path, tmp_path):
    write(path, range(1, 4))
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    write(link, [3], resumed_step=2)
    assert link.is_symlink()
    assert read(path) == lines_of([1, 2, 3])


def scalars_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_has_the_figures_and_hides_what_a_resumed_run_makes_again(tmp_path):
    for steps, resumed_step in ((range(1, 6), None), (range(4, 6), 3)):
        with closing(TensorBoardWriter(tmp_path, resumed_step=resumed_step)) as writer:
            for step in steps:
                writer.add_scalar("loss", 1 / 2**step + (resumed_step or 0), step)
            writer.flush()
        # What makes the order of two files of one second right.
        for file in tmp_path.iterdir():
            file.rename(file.with_name(f"{file.name}.{resumed_step or 0}"))
    first = [(step, 1 / 2**step) for step in range(1, 4)]
    assert scalars_of(tmp_path) == {"loss": [*first, (4, 3 + 1 / 16), (5, 3 + 1 / 32)]}
    with pytest.raises(UsageError, match=r"expected no event files in .* yet, got events"):
        TensorBoardWriter(tmp_path)
    TensorBoardWriter(tmp_path / "another").close()


def test_where_tensorboard_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sidestream\[tensorboard\]'"):
        TensorBoardWriter(tmp_path)


def _loaded(rank, world_size):
    import sidestream.training.measures  # noqa: F401

    return sorted({"tensorboard", "torch.utils.tensorboard"} & sys.modules.keys())


def test_tensorboard_is_imported_by_its_writer_alone():
    assert run_on_ranks(_loaded, 1, backend=None) == [[]]


class Kept:
    def __init__(self, *, fails=False):
        self.calls, self.fails = [], fails

    def add_scalar(self, tag, value, step):
        self.calls.append((tag, value, step))

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")
        if self.fails:
            raise OSError("no space")


def test_each_of_several_writers_has_all():
    first, second = Kept(), Kept(fails=True)
    writer = SeveralWriters([first, second, first])
    writer.add_scalar("loss", 1.0, 2)
    writer.flush()
    with pytest.raises(OSError, match="no space"):
        writer.close()
    assert second.calls == [("loss", 1.0, 2), "flush", "close"]
    assert sorted(map(str, first.calls)) == sorted(map(str, second.calls * 2))


def test_no_writers_take_all():
    writer = SeveralWriters([])
    writer.add_scalar("loss", 1.0, 1)
    writer.flush()
    writer.close()


def test_a_path_can_be_a_text(tmp_path):
    write(str(tmp_path / "run.jsonl"), [1])
    assert read(Path(tmp_path / "run.jsonl")) == lines_of([1])
