"""Options of NCCL for the groups of a job, from a mapping or a YAML file.

dp_cp:
  min_ctas: 1
  max_ctas: 16
  net_name: IB
tp:
  is_high_priority_stream: true
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .model_parallel_layout import GROUP_KINDS

Options = Mapping[str, Any]

_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "min_ctas": (lambda value: type(value) is int and value >= 1, "a count of thread blocks"),
    "max_ctas": (lambda value: type(value) is int and value >= 1, "a count of thread blocks"),
    "cga_cluster_size": (lambda value: type(value) is int and value in range(9), "0 to 8"),
    "net_name": (lambda value: str(value).lower() in ("ib", "socket"), "'IB' or 'socket'"),
    "is_high_priority_stream": (lambda value: isinstance(value, bool), "True or False"),
}
_MEGATRON_NAMES = {
    "ep_tp": "expt_tp",
    "tp_ep_mp": "tp_ep",
    "ep_dp": "expt_dp",
    "intra_ep_dp": "intra_expt_dp",
    "inter_ep_dp": "inter_dist_opt",
    "intra_dist_opt_instance": "intra_dist_opt",
}
"""Groups that files for Megatron-Core call by another name than its collection does."""


def nccl_options(source: str | Path | Mapping[str, Options] | None) -> dict[str, Options]:
    """Options by the group's name in `ProcessGroupCollection`; Megatron-Core's names are known too.

    source: a mapping, or the YAML file that has one; its options are the fields of NCCL's own
    configuration and whether the stream goes before others.

    Raises:
        FileNotFoundError: no such file.
        ModuleNotFoundError: a file, without PyYAML.
        ValueError: unknown groups or options, wrong values; all of them in one message.
    """
    table = _read(source) if isinstance(source, str | Path) else source
    found, problems = dict[str, Options](), []
    for given, options in _mapping(table or {}, "groups").items():
        name = _MEGATRON_NAMES.get(given, given)
        if name not in GROUP_KINDS:
            problems.append(f"{given}: expected one of the groups {list(GROUP_KINDS)}")
        elif name in found:
            problems.append(f"{given}: expected each group once, got {name} by two names")
        else:
            found[name] = _mapping(options, f"options of {given}")
            problems += [f"{given}.{problem}" for problem in _problems(found[name])]
    if problems:
        raise ValueError(f"nccl_communicator_config_path: {'; '.join(problems)}; change these")
    return found


def _problems(options: Options) -> Iterator[str]:
    for option, value in options.items():
        fits, expected = _OPTIONS.get(option, (lambda _: False, f"one of {list(_OPTIONS)}"))
        if not fits(value):
            yield f"{option}: expected {expected}, got {value!r}"


def torch_options(options: Options | None, backend: str) -> Any:
    """What torch takes as `pg_options`; None for NCCL's own.

    Raises:
        ValueError: options for another backend than nccl.
    """
    if not options:
        return None
    if backend != "nccl":
        raise ValueError(
            f"nccl_communicator_config_path: expected a job over nccl, got {backend} and "
            f"{dict(options)}; leave the options out"
        )
    made = dist.ProcessGroupNCCL.Options()
    for name, value in options.items():
        setattr(made if name == "is_high_priority_stream" else made.config, name, value)
    return made


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"nccl_communicator_config_path: expected a mapping of {what}, got {value!r}; write "
            "names and values, as `sidestream.sharding.nccl_options` shows"
        )
    return value


def _read(path: str | Path) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"nccl_communicator_config_path: expected PyYAML to read {path}, got none; pip install "
            "pyyaml, or pass a mapping",
            name="yaml",
        ) from error
    with open(path, encoding="utf-8") as file:
        return yaml.safe_load(file)
