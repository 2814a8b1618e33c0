"""Options of NCCL for the groups of a job, from a mapping or a YAML file.

dp_cp:
  min_ctas: 1
  max_ctas: 16
  net_name: IB
tp:
  is_high_priority_stream: true
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .arguments import require_flag
from .model_parallel_layout import kind_of_group
from .rank_grid import require_count

_MEGATRON_NAMES = {
    "ep_tp": "expt_tp",
    "tp_ep_mp": "tp_ep",
    "ep_dp": "expt_dp",
    "intra_ep_dp": "intra_expt_dp",
    "inter_ep_dp": "inter_dist_opt",
    "intra_dist_opt_instance": "intra_dist_opt",
}
"""Groups that files for Megatron-Core call by another name than its collection does."""


@dataclass(frozen=True, slots=True)
class NcclOptions:
    """Options of one communicator; None leaves NCCL's own.

    min_ctas, max_ctas: bounds of the thread blocks of a collective. cga_cluster_size: thread blocks
    in a cluster, 0 to 8. net_name: "IB" or "socket". is_high_priority_stream: whether its stream
    goes before others.

    Raises:
        TypeError, ValueError: a value is none of these.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    net_name: str | None = None
    is_high_priority_stream: bool = False

    def __post_init__(self) -> None:
        for name, least in (("min_ctas", 1), ("max_ctas", 1), ("cga_cluster_size", 0)):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), least)
        if self.min_ctas and self.max_ctas and self.min_ctas > self.max_ctas:
            raise ValueError(
                f"min_ctas: expected at most max_ctas {self.max_ctas}, got {self.min_ctas}; swap "
                "them"
            )
        if (self.cga_cluster_size or 0) > 8:  # noqa: PLR2004
            raise ValueError(f"cga_cluster_size: expected 0 to 8, got {self.cga_cluster_size}")
        if self.net_name is not None and str(self.net_name).lower() not in ("ib", "socket"):
            raise ValueError(f"net_name: expected 'IB' or 'socket', got {self.net_name!r}")
        require_flag("is_high_priority_stream", self.is_high_priority_stream)

    def to_torch(self) -> Any:
        """What torch takes as `pg_options`; None where all is left to NCCL."""
        if self == NcclOptions():
            return None
        options = dist.ProcessGroupNCCL.Options(
            is_high_priority_stream=self.is_high_priority_stream
        )
        for name in ("min_ctas", "max_ctas", "cga_cluster_size", "net_name"):
            if getattr(self, name) is not None:
                setattr(options.config, name, getattr(self, name))
        return options


def nccl_options(
    source: str | Path | Mapping[str, Mapping[str, Any]] | None,
    high_priority: Iterable[str] = (),
) -> dict[str, NcclOptions]:
    """Options by the group's name in `ProcessGroupCollection`; Megatron-Core's names are known too.

    source: a mapping, or the YAML file that has one. high_priority: groups whose streams go first.

    Raises:
        FileNotFoundError: no such file.
        ModuleNotFoundError: a file, without PyYAML.
        TypeError, ValueError: unknown groups or options, wrong values.
    """
    table = _read(source) if isinstance(source, str | Path) else (source or {})
    known = {field.name for field in dataclasses.fields(NcclOptions)}
    found: dict[str, NcclOptions] = {}
    for given, values in _mapping("nccl_communicator_config_path", table).items():
        name = _MEGATRON_NAMES.get(given, given)
        kind_of_group(name)
        if unknown := set(_mapping(given, values)) - known:
            raise ValueError(
                f"{given}: expected some of {sorted(known)}, got {sorted(unknown)}; use such names"
            )
        try:
            found[name] = NcclOptions(**values)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{given}: {error}") from None
    for name in (_MEGATRON_NAMES.get(name, name) for name in high_priority):
        kind_of_group(name)
        own = found.get(name, NcclOptions())
        found[name] = dataclasses.replace(own, is_high_priority_stream=True)
    return found


def require_nccl(options: Mapping[str, NcclOptions], backend: str) -> None:
    """Refuse options where another backend would not have them.

    Raises:
        ValueError: there are some and the backend is another.
    """
    if options and backend != "nccl":
        raise ValueError(
            f"nccl_communicator_config_path: expected a job over nccl, got {backend} and options "
            f"for {list(options)}; leave them out"
        )


def _mapping(what: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what}: expected a mapping of names, got {value!r}; see `nccl_options`")
    return value


def _read(path: str | Path) -> object:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"nccl_communicator_config_path: expected PyYAML to read {path}, got none; pip install "
            "pyyaml, or pass a mapping",
            name="yaml",
        ) from error
    with open(path, encoding="utf-8") as file:
        return yaml.safe_load(file) or {}
