import pytest

from sidestream.training import diagnostics
from sidestream.training.diagnostics import (
    check_connections,
    check_interpreter,
    check_pair,
    check_python,
    check_release,
    collect,
)


def test_this_machine_can_train():
    checks = collect({})
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert {"torch", "triton", "gloo", "NCCL", "loopback", "device used", "kernels used"} <= set(
        names
    )
    assert [check for check in checks if check.status == "error"] == []


def test_environment_is_looked_at():
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TRITON_INTERPRET": "1"}
    status = {check.name: check.status for check in collect(environ)}
    assert status["CUDA_DEVICE_MAX_CONNECTIONS"] == "warning"
    assert status["TRITON_INTERPRET"] == "warning"


@pytest.mark.parametrize(
    ("value", "status"), [(None, "ok"), ("8", "ok"), ("1", "warning")], ids=["unset", "8", "1"]
)
def test_one_connection_is_warned_of(value, status):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    check = check_connections({} if value is None else {name: value}, has_cuda=True)
    assert check.status == status
    assert (check.fix == f"unset {name}") == (status == "warning")


@pytest.mark.parametrize(
    ("value", "status"), [("0", "ok"), ("", "ok"), ("1", "warning")], ids=["0", "empty", "1"]
)
def test_interpreter_is_warned_of(value, status):
    assert check_interpreter({"TRITON_INTERPRET": value}).status == status


@pytest.mark.parametrize(
    ("package", "found", "status"),
    [
        ("torch", "2.10.0", "error"),
        ("torch", "2.11.0+cu130", "ok"),
        ("torch", "2.14.1", "ok"),
        ("torch", "3.0.0", "warning"),
        ("torch", None, "error"),
        ("triton", "3.5.1", "error"),
        ("triton", "3.9.0", "ok"),
        ("triton", "3.10.0", "warning"),
    ],
    ids=str,
)
def test_releases_are_compared_by_number(package, found, status):
    check = check_release(package, found)
    assert check.status == status
    assert bool(check.fix) == (status != "ok")


def test_triton_may_be_missing_on_a_cpu(monkeypatch):
    for has_gpu, status in ((False, "warning"), (True, "error")):
        monkeypatch.setattr(diagnostics.torch.cuda, "is_available", lambda value=has_gpu: value)
        assert check_release("triton", None).status == status


@pytest.mark.parametrize(
    ("triton", "wanted", "status"),
    [
        ("3.6.0", None, "ok"),
        ("3.6.1", "3.6.0", "ok"),
        ("3.7.0", "3.6.0", "warning"),
        (None, "3.6.0", "warning"),
    ],
    ids=["cpu_build", "same", "other", "missing"],
)
def test_pair_is_compared(triton, wanted, status):
    assert check_pair(triton, wanted).status == status


def test_old_python_is_an_error():
    assert check_python((3, 10), "3.10.1").status == "error"
    assert check_python((3, 11), "3.11.0").status == "ok"
