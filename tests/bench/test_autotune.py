"""Autotune: the search on a simulated clock, what is pruned, gated and written, and bad input."""

import dataclasses
import json
import random

import pytest
import torch

from sidestream import cli
from sidestream.bench import sweep, tuning
from sidestream.bench.clocks import Ticker
from sidestream.bench.commands import autotune
from sidestream.kernels import LaunchConfig, tuned
from sidestream.kernels.case import Case, Operands

DEFAULT = LaunchConfig(8192, 8)
CONFIGS = (DEFAULT, *(LaunchConfig(1024 << i, w) for i in range(5) for w in (2, 4)))
NAME, TRITON = "NVIDIA Test 80GB", "3.6.0"


class Machine:
    """A GPU whose calls take `truth` seconds, with noise, drift and interruptions."""

    def __init__(self, truth, seed=0, noise=0.0, overhead_s=0.001):
        self.truth, self.noise, self.overhead_s = truth, noise, overhead_s
        self.random = random.Random(seed)
        self.time = 0.0
        self.sampled = []

    def now(self):
        return self.time

    def sample(self, config):
        self.sampled.append(config)
        drift = 1.0 + self.noise * 3 * (int(self.time * 7) % 5) / 5
        seconds = self.truth[config] * drift * self.random.lognormvariate(0.0, self.noise)
        if self.noise and self.random.random() < 0.04:
            seconds *= 3.0
        self.time += self.overhead_s + seconds
        return seconds


def search(machine, candidates=CONFIGS, *, prune=None, gate=None, budget_s=10.0):
    return sweep.sweep(
        candidates,
        prune=prune or (lambda config: None),
        gate=gate or (lambda config: None),
        sample=machine.sample,
        budget_s=budget_s,
        now=machine.now,
    )


def fates(found):
    return {trial.config: trial.fate for trial in found.trials}


@pytest.mark.parametrize("seed", range(4), ids="seed {}".format)
def test_two_runs_choose_within_three_percent(seed):
    """Candidates differ by some percent, samples by 2 % and now and then by far more."""
    generator = random.Random(seed)
    truth = {config: 1e-4 * (1.0 + abs(generator.gauss(0.0, 0.06))) for config in CONFIGS}
    best = min(truth.values())
    chosen = [truth[search(Machine(truth, 100 * seed + run, 0.02)).chosen] for run in range(6)]
    assert max(chosen) / min(chosen) < 1.03
    assert max(chosen) / best < 1.03


@pytest.mark.parametrize(
    ("seconds", "chosen", "gain"),
    [(0.8, CONFIGS[3], 0.2), (0.995, DEFAULT, 0.0)],
    ids=["the fastest", "within 1 % the default"],
)
def test_what_is_chosen_and_its_gain(seconds, chosen, gain):
    found = search(Machine(dict.fromkeys(CONFIGS, 1.0) | {CONFIGS[3]: seconds}), budget_s=1000.0)
    assert (found.chosen, found.gain) == (chosen, pytest.approx(gain))
    assert found.median_of(CONFIGS[3]) == seconds


def test_what_is_pruned_is_never_run_and_what_is_wrong_never_timed():
    machine = Machine(dict.fromkeys(CONFIGS, 1.0) | {CONFIGS[1]: 0.1, CONFIGS[2]: 0.1})
    gated = []
    found = search(
        machine,
        prune=lambda config: "spills" if config in CONFIGS[:2] else None,
        gate=lambda config: gated.append(config) or ("wrong" if config == CONFIGS[2] else None),
    )
    assert CONFIGS[1] not in gated
    assert gated[0] == DEFAULT  # which is not pruned, spill as it may
    assert not {CONFIGS[1], CONFIGS[2]} & set(machine.sampled)
    assert (fates(found)[CONFIGS[1]], fates(found)[CONFIGS[2]]) == ("spills", "wrong")
    assert found.chosen not in CONFIGS[1:3]


def test_a_wrong_default_is_not_tuned():
    machine = Machine(dict.fromkeys(CONFIGS, 1.0))
    found = search(machine, gate=lambda config: "wrong" if config == DEFAULT else None)
    assert (found.chosen, found.gain, machine.sampled) == (None, None, [])


def test_what_cannot_be_timed_any_more_is_left_out(monkeypatch):
    machine = Machine(dict.fromkeys(CONFIGS, 1.0) | {CONFIGS[1]: 0.1, CONFIGS[2]: 0.5})
    sample = machine.sample

    def sample_or_refuse(config):
        if config == CONFIGS[1] and machine.sampled.count(config) == 2:
            raise sweep.NotTimedError("full")
        return sample(config)

    monkeypatch.setattr(machine, "sample", sample_or_refuse)
    found = search(machine)
    assert (found.chosen, fates(found)[CONFIGS[1]]) == (CONFIGS[2], "full")


def test_a_budget_is_kept():
    machine = Machine(dict.fromkeys(CONFIGS, 1e-4), overhead_s=0.01)
    search(machine, budget_s=2.0)
    round_s = 0.0101 * len(CONFIGS)
    assert machine.time <= 2.0 + round_s
    assert machine.time >= 1.0


def test_what_the_gate_has_no_time_for_is_not_timed():
    machine = Machine(dict.fromkeys(CONFIGS, 1e-4))

    def slow_gate(config):
        machine.time += 1.0

    found = search(machine, gate=slow_gate, budget_s=4.0)
    assert list(fates(found).values()).count(sweep.NO_TIME) == len(CONFIGS) - 2
    assert set(machine.sampled) == set(CONFIGS[:2])
    alone = search(machine, gate=slow_gate, budget_s=0.0)
    assert (alone.chosen, alone.gain) == (DEFAULT, None)


# What can be tuned.


def of(op, key):
    """The tunable."""
    (found,) = (one for one in tuning.tunables() if (one.op, one.key) == (op, key))
    return found


def test_everything_that_a_table_may_hold_can_be_tuned_once():
    found = tuning.tunables()
    assert len({(one.op, one.key) for one in found}) == len(found)
    assert {one.op for one in found} == set(tuned.LIMITS)
    assert of("pack_", "bf16").case.full_name == "pack bf16 to bf16"
    assert tuning.select(None) == list(found)
    assert {one.op for one in tuning.select(["cast", "pack_"])} == {"cast_", "pack_"}


def test_candidates_are_legal_distinct_and_begin_with_the_default():
    tunable = of("pack_", "fp32 accumulate")
    found = tunable.candidates()
    assert found[0] == tunable.default
    assert len(set(found)) == len(found) > len(tuning.WARPS)
    assert not [one for one in found if tuned.illegal("pack_", one)]
    assert list(found[1:]) == sorted(found[1:], key=sweep.size_of)


@pytest.mark.parametrize(
    ("op", "key"),
    [("quantize_mx_", "e4m3"), ("quantize_fp8_", "128x128")],
    ids=["one size of tiles", "squares"],
)
def test_where_blocks_of_all_sizes_are_the_same_only_warps_are_candidates(op, key):
    found = of(op, key).candidates()
    assert sorted(one.num_warps for one in found) == list(tuning.WARPS)


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        (tuning.Resources(40, 0, 0, 0.25), None),
        (tuning.Resources(255, 8, 0, 1.0), "spills 8 bytes"),
        (tuning.Resources(255, 0, 0, 0.12), "occupancy 12%"),
        (tuning.Resources(40, 0, 0, None), None),
        ("not compiled: CompilationError", "not compiled: CompilationError"),
        (None, None),
    ],
    ids=["fits", "spills", "crowded", "no occupancy", "not compiled", "not looked at"],
)
def test_what_is_pruned(resources, reason):
    assert tuning.reason(resources) == reason


def test_what_does_not_compile_is_a_reason(monkeypatch):
    def refuse(case, target, config):
        raise RuntimeError("at 1:0") from ValueError("a source line\ntypes differ")

    monkeypatch.setattr(tuning, "measure", refuse)
    task = ("pack_", "bf16 to bf16", DEFAULT, "sm_90")
    assert tuning.look(task) == "not compiled: types differ"


def test_looks_end_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(tuning, "look", lambda task: "looked")
    seen = []
    found = tuning.look_at_all(["a", "b", "c"], 1, seen.append, lambda: len(seen) == 2)
    assert (found, seen) == ({"a": "looked", "b": "looked"}, ["a", "b"])


# On a device: here a CPU, and an op that adds one in place.


class Adding(Case):
    """Adds 1 to its operand, and 2 with the configurations `wrong`; tells what it launched."""

    def agrees(self, device, numel):
        operands = self.operands(device, numel)
        expected = operands.updated[0] + 1.0
        self.call(operands)
        return torch.equal(operands.updated[0], expected)


def adding(key="bf16", wrong=()):
    launches = []

    def call(operands):
        config = tuned.config_for("pack_", key, DEFAULT, torch.device("cpu"))
        launches.append((config, operands.updated[0]))
        operands.updated[0].add_(2.0 if config in wrong else 1.0)

    case = Adding(
        op="pack_",
        name="adding",
        format="fp32",
        dtype="fp32",
        numel=lambda numel: numel,
        num_bytes=lambda numel: 8 * numel,
        make=lambda device, numel: Operands(updated=[torch.randn(numel, device=device)]),
        call=call,
    )
    return tuning.Tunable(case, "bf16", DEFAULT), launches


class EveryCall:
    """A clock that makes each call once before it starts and once in a sample."""

    cache_bytes = 2048

    def __init__(self, methods=()):
        self.methods = iter(methods)

    def tickers(self, runs):
        return {name: self._ticker(calls) for name, calls in runs.items()}

    def _ticker(self, calls):
        def sample():
            for call in calls:
                call()
            return 1.0

        sample()
        return Ticker(sample, next(self.methods, "calls"))


def workbench(tunable, methods=()):
    return tuning.Workbench(tunable, 256, torch.device("cpu"), EveryCall(methods))


def test_the_gate_looks_at_every_candidate_on_operands_of_its_own():
    tunable, launches = adding(wrong=CONFIGS[2:3])
    bench = workbench(tunable)
    found = [bench.fault(config) for config in CONFIGS[:4]]
    assert found == [None, None, "wrong result", None]
    assert [config for config, _ in launches] == list(CONFIGS[:4])
    assert len({id(x) for _, x in launches}) == 4


def test_samples_are_of_the_candidate_and_leave_the_gate_alone():
    tunable, launches = adding()
    bench = workbench(tunable)
    for config in CONFIGS[:2]:
        launches.clear()
        assert bench.sample(config) > 0.0
        assert {used for used, _ in launches} == {config}
        assert len({x.data_ptr() for _, x in launches}) == 4  # of 1 KiB each: twice the cache
        assert len(launches) == 8
    assert bench.fault(CONFIGS[0]) is None


def test_a_candidate_that_is_timed_otherwise_than_the_default_is_not_compared():
    bench = workbench(adding()[0], ["CUDA graph", "CUDA events"])
    assert bench.sample(DEFAULT) > 0.0
    with pytest.raises(sweep.NotTimedError, match="by CUDA events, others by CUDA graph"):
        bench.sample(CONFIGS[1])


def test_a_kernel_that_cannot_run_is_at_fault_and_a_full_device_only_untimed():
    def call(operands):
        raise torch.OutOfMemoryError("full")

    tunable, _ = adding()
    full = dataclasses.replace(tunable, case=dataclasses.replace(tunable.case, call=call))
    assert workbench(full).fault(DEFAULT) == "OutOfMemoryError: full"
    with pytest.raises(sweep.NotTimedError, match="out of memory"):
        workbench(full).sample(DEFAULT)


def test_a_launcher_that_asks_for_another_case_is_told():
    tunable, _ = adding(key="fp32")
    with pytest.raises(RuntimeError, match=r"pack_ bf16: expected launches of that case"):
        workbench(tunable).sample(DEFAULT)
    assert "expected launches of that case" in workbench(tunable).fault(DEFAULT)


# The command.


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """The CPU taken for a GPU, with one tunable; folders of tables below `tmp_path`."""
    state = {"wrong": (), "looked": []}

    def look_at_all(tasks, num_processes, on_look, is_over):
        state["looked"] += tasks
        for task in tasks:
            on_look(task)
        spilling = tuning.Resources(255, 8, 0, 1.0)
        good = tuning.Resources(32, 0, 0, 1.0)
        return {task: spilling if task[2].num_warps == 4 else good for task in tasks}

    monkeypatch.setattr(autotune, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(tuned, "device_name", lambda device: NAME)
    monkeypatch.setattr(tuned, "triton_version", lambda: TRITON)
    monkeypatch.setattr(tuning, "target_of", lambda device: "sm_90")
    monkeypatch.setattr(tuning, "look_at_all", look_at_all)
    monkeypatch.setattr(sweep, "MAX_ROUNDS", sweep.MIN_ROUNDS)
    monkeypatch.setattr(tuning, "select", lambda ops: [adding(wrong=state["wrong"])[0]])
    monkeypatch.setattr(tuning.Tunable, "candidates", lambda tunable: CONFIGS)
    monkeypatch.setattr(tuned, "PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    return state


def run(*arguments):
    return cli.main(["autotune", "--budget", "2", "--numel", "256", *map(str, arguments)])


def test_a_run_writes_a_table_that_launches_read(gpu, tmp_path, capsys):
    assert run() == 0
    path = tmp_path / "config" / "sidestream" / "tuned" / "nvidia_test_80gb.json"
    assert f"written to {path}" in capsys.readouterr().out
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    content = json.loads(path.read_text())
    assert (content["device"], content["triton"]) == (NAME, TRITON)
    assert (content["schema_version"], content["kind"]) == (1, "tuned")
    assert content["command"].startswith("sidestream autotune --budget 2")
    assert {"torch", "triton", "commit"} <= set(content["machine"])
    (entry,) = content["entries"]
    assert (entry["case"], entry["measured"], entry["numel"]) == ("bf16", "pack adding", 256)
    table = tuned.load_table(NAME, TRITON)
    chosen = LaunchConfig(entry["block_bytes"], entry["num_warps"])
    assert table.entries == {("pack_", "bf16"): chosen}
    candidates = {
        LaunchConfig(one["block_bytes"], one["num_warps"]): one for one in entry["candidates"]
    }
    assert set(candidates) == {task[2] for task in gpu["looked"]}
    for config, one in candidates.items():
        if config.num_warps == 4:
            assert one["fate"] == "spills 8 bytes"
        else:
            assert one["fate"] == sweep.TIMED
            assert 0.0 < one["low_us"] <= one["median_us"] <= one["high_us"]


def test_other_entries_stay_and_those_of_another_version_go(gpu, tmp_path, capsys):
    folder = tmp_path / "tables"
    path = folder / "nvidia_test_80gb.json"
    assert run("--to", folder) == 0
    content = json.loads(path.read_text())
    other = {"op": "reduce_", "case": "x", "block_bytes": 2048, "num_warps": 4, "why": "kept"}
    content["entries"].append(other)
    path.write_text(json.dumps(content))
    assert run("--to", folder) == 0
    found = json.loads(path.read_text())["entries"]
    assert [entry["op"] for entry in found] == ["pack_", "reduce_"]
    assert found[1] == other
    path.write_text(json.dumps({**content, "triton": "3.5.0"}))
    capsys.readouterr()
    assert run("--to", folder) == 0
    assert "is made anew: triton: expected 3.6" in capsys.readouterr().out
    assert [entry["op"] for entry in json.loads(path.read_text())["entries"]] == ["pack_"]


def test_where_it_goes_and_what_overrules_it(gpu, tmp_path, capsys, monkeypatch):
    assert run("--to", tmp_path / "elsewhere") == 0
    assert f"launches do not read it; set {tuned.VARIABLE}=" in capsys.readouterr().out
    assert run() == 0
    capsys.readouterr()
    assert run("--to", "package") == 0
    assert (tmp_path / "package" / "nvidia_test_80gb.json").is_file()
    assert "what " + str(tuned.user_folder()) in capsys.readouterr().out


def test_a_wrong_default_is_told_and_nothing_written(gpu, tmp_path, capsys):
    gpu["wrong"] = (DEFAULT,)
    assert run("--to", tmp_path / "tables", "--json", tmp_path / "all.json") == 1
    assert "WRONG, so not tuned: wrong result" in capsys.readouterr().out
    assert list((tmp_path / "tables").iterdir()) == []
    assert json.loads((tmp_path / "all.json").read_text())["entries"] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--op", "fly"], "expected some of pack_, unpack_"),
        (["--budget", "nan"], "expected seconds above 0, got 'nan'"),
        (["--arch", "sm_80"], "expected --arch with --dry-run alone"),
        (["--dry-run", "--arch", "sm_1"], "--arch: expected some of sm_80"),
        (["--dry-run", "--json", "/nowhere/a.json"], "expected --json in a folder that exists"),
    ],
    ids=" ".join,
)
def test_bad_input_is_refused_before_any_work(arguments, text, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "look_at_all", None)
    try:
        code = cli.main(["autotune", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == cli.EXIT_USAGE
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(gpu, tmp_path, capsys, name):
    (tmp_path / "file").write_text("")
    assert run("--to", tmp_path / name) == cli.EXIT_USAGE
    assert "--to" in capsys.readouterr().err
    assert gpu["looked"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_other_commands_are_named(capsys):
    assert cli.main(["autotune"]) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert "expected a GPU that torch sees, got none" in error
    assert "--dry-run" in error and "bench kernels" in error


def test_a_dry_run_lists_candidates_and_writes_no_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "WARPS", (2,))
    monkeypatch.setattr(tuning, "ACCESSES", (1,))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    listing = tmp_path / "listing.json"
    arguments = ["--dry-run", "--op", "hadamard16", "--jobs", "1", "--json", str(listing)]
    assert cli.main(["autotune", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "candidates on sm_90" in printed
    assert "hadamard16_ bf16: 2 of 2 to be timed" in printed
    assert " 1024 B 2 W " in printed and "occupancy" in printed
    rows = json.loads(listing.read_text())["rows"]
    assert all(row["registers"] > 0 and 0 < row["occupancy"] <= 1 for row in rows)
    assert not (tmp_path / "config").exists()


@pytest.mark.gpu
def test_a_gpu_is_tuned(tmp_path, monkeypatch):
    arguments = ["--op", "unpack_,l2_norm_", "--budget", "30", "--numel", "1M"]
    assert cli.main(["autotune", *arguments, "--to", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    entries = json.loads(path.read_text())["entries"]
    assert {entry["op"] for entry in entries} == {"unpack_", "l2_norm_"}
    assert all(any("median_us" in one for one in entry["candidates"]) for entry in entries)
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    tuned.table_of.cache_clear()
    try:
        for entry in entries:
            chosen = LaunchConfig(entry["block_bytes"], entry["num_warps"])
            assert tuned.config_for(entry["op"], entry["case"], DEFAULT, device) == chosen
    finally:
        tuned.table_of.cache_clear()
