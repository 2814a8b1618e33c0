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

_COUNT = (lambda value: type(value) is int and value >= 1), "a count of thread blocks"
_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "min_ctas": _COUNT,
    "max_ctas": _COUNT,
    "cga_cluster_size": (lambda value: type(value) is int and value in range(9), "0 to 8"),
    "net_name": (lambda value: str(value).lower() in ("ib", "socket"), "'IB' or 'socket'"),
    "is_high_priority_stream": (lambda value: isinstance(value, bool), "True or False"),
}


def nccl_options(source: str | Path | Mapping[str, Options] | None) -> dict[str, Options]:
    """Options by the group's name in `ProcessGroupCollection`.

    source: a mapping, or the YAML file that has one; its options are the fields of NCCL's own
    configuration and whether the stream goes before others.

    Raises:
        FileNotFoundError: no such file.
        ModuleNotFoundError: a file, without PyYAML.
        ValueError: unknown groups or options, wrong values; all of them in one message.
    """
    table = _read(source) if isinstance(source, str | Path) else source
    table = {} if table is None else table
    if problems := list(_problems(table)):
        raise ValueError(f"nccl_communicator_config_path: {'; '.join(problems)}; change these")
    return dict(table)


def _problems(table: Any) -> Iterator[str]:
    if not isinstance(table, Mapping):
        yield f"expected a mapping of groups to options, got {table!r}"
        return
    for group, options in table.items():
        if group not in GROUP_KINDS:
            yield f"{group}: expected one of the groups {list(GROUP_KINDS)}"
        elif not isinstance(options, Mapping):
            yield f"{group}: expected a mapping of options to values, got {options!r}"
        else:
            for name, value in options.items():
                fits, expected = _OPTIONS.get(name, (lambda _: False, f"one of {list(_OPTIONS)}"))
                if not fits(value):
                    yield f"{group}.{name}: expected {expected}, got {value!r}"


def torch_options(options: Options, backend: str) -> Any:
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


def _read(path: str | Path) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"nccl_communicator_config_path: expected PyYAML to read {path}, got none; pip install "
            "pyyaml, or pass a mapping",
            name="yaml",
        ) from error
    return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
