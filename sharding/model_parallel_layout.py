"""Which ranks are in which group of a model-parallel job, from sizes and an order of dimensions.
Nothing here communicates.

    dense layers   tp x cp x dp x pp         dp = world_size / (tp x cp x pp)
    experts        etp x ep x expt_dp x pp   expt_dp = world_size / (etp x ep x pp)

The leftmost of `order` varies fastest. Both are factorisations of the same ranks with the same
pipelines. The rules are those of Megatron-Core's `parallel_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .arguments import require_count
from .rank_grid import RankGrid, described

Ranks = tuple[int, ...]
_DIMS = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, kw_only=True)
class ModelParallelLayout:
    """Sizes of all dimensions; the job's ranks from `rank_offset` on are `world_size` many.

    virtual_pipeline_model_parallel_size: how many parts of the model a stage has, which changes no
    group. expert_tensor_parallel_size: None for that of dense layers.
    num_distributed_optimizer_instances: parts of the data-parallel ranks that are replicas of each
    other: stretches of `dp_cp` and of `expt_dp`. order: dimensions joined by "-"; those of size 1
    may be left out.

    Raises:
        TypeError: a size is no number.
        ValueError: a size that is no whole number of at least 1, sizes whose product does not
            divide `world_size`, an order that lacks a dimension or in which dense layers and
            experts would have other pipelines or instances.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    num_distributed_optimizer_instances: int = 1
    order: str = "tp-cp-ep-dp-pp"
    rank_offset: int = 0
    dense: RankGrid = field(init=False, repr=False, compare=False)
    experts: RankGrid = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith(("_size", "_instances")) and value is not None:
                require_count(name, value)
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if self.virtual_pipeline_model_parallel_size is not None and pipeline == 1:
            raise ValueError(
                "virtual_pipeline_model_parallel_size: expected None without a pipeline, got "
                f"{self.virtual_pipeline_model_parallel_size}; leave it out, or have "
                "pipeline_model_parallel_size above 1"
            )
        cp, ep = self.context_parallel_size, self.expert_model_parallel_size
        dense = {"tp": tensor, "cp": cp, "pp": pipeline}
        experts = {"tp": self.expert_tensor_parallel_size or tensor, "ep": ep, "pp": pipeline}
        dense["dp"] = self._data_parallel_size(dense, "dense layers")
        experts["dp"] = self._data_parallel_size(experts, "experts")
        largest = {name: max(dense.get(name, 1), experts.get(name, 1)) for name in _DIMS}
        names = _in_order(self.order, largest)
        of_dense, of_experts = ([name for name in names if name in of] for of in (dense, experts))
        grid = RankGrid([dense[name] for name in of_dense], of_dense, self.rank_offset)
        view = grid.view([experts[name] for name in of_experts], of_experts, ("pp",))
        object.__setattr__(self, "dense", grid)
        object.__setattr__(self, "experts", view)
        self._require_instances(dense["dp"] * dense["cp"], experts["dp"])

    def groups(self, name: str) -> list[Ranks]:
        """Every group of the kind `name`; in each the ranks ascend.

        Raises:
            ValueError: no such kind.
        """
        kind = group_kind(name)
        bases = (self.experts if kind.of_experts else self.dense).get_rank_enum(kind.dims)
        return [group for base in bases for group in kind.cut(self, base)]

    def group_of(self, name: str, rank: int) -> Ranks | None:
        """The one of `groups(name)` that `rank` is in, if any.

        Raises:
            ValueError: no such kind, a rank that is not of this job.
        """
        kind = group_kind(name)
        base = (self.experts if kind.of_experts else self.dense).group_of(rank, kind.dims)
        return next((group for group in kind.cut(self, base) if rank in group), None)

    def _data_parallel_size(self, sizes: dict[str, int], what: str) -> int:
        product = math.prod(sizes.values())
        if self.world_size % product:
            raise ValueError(
                f"world_size: expected a multiple of {described(sizes)} for {what}, got "
                f"{self.world_size}; change the sizes or start another number of ranks"
            )
        return self.world_size // product

    def _require_instances(self, dense: int, experts: int) -> None:
        """dense, experts: how many data-parallel ranks there are."""
        count = self.num_distributed_optimizer_instances
        if dense % count or experts % count:
            raise ValueError(
                f"num_distributed_optimizer_instances: expected a divisor of the {dense} data-"
                f"parallel ranks (dp x cp) and the {experts} of experts, got {count}; pass one"
            )
        of_dense, of_experts = (
            {group for base in self.groups(name) for group in _across(self, base)}
            for name in ("dp_cp", "expt_dp")
        )
        if of_dense != of_experts:
            raise ValueError(
                f"order: expected one that cuts dense layers and experts into the same {count} "
                f"optimizer instances, got '{self.order}', where replicas of dense layers are "
                f"{min(of_dense)} and so on, those of experts {min(of_experts)}; let dp come after "
                "tp, cp and ep"
            )


def _in_order(order: object, sizes: Mapping[str, int]) -> list[str]:
    """The dimensions of `order`, the fastest first, and those of size 1 that it leaves out."""
    names = order.lower().split("-") if isinstance(order, str) else []
    left_out = [name for name in _DIMS if name not in names]
    needed = [f"{name} of size {sizes[name]}" for name in left_out if sizes[name] > 1]
    if sorted(names + left_out) != sorted(_DIMS) or needed:
        raise ValueError(
            f"order: expected {', '.join(_DIMS)} joined by '-', each once, got {order!r}"
            + (f", which lacks {', '.join(needed)}" if needed else "")
            + "; name every dimension whose size is not 1, the fastest first"
        )
    return names + left_out


def _whole(_: ModelParallelLayout, base: Ranks) -> list[Ranks]:
    return [base]


def _first(_: ModelParallelLayout, base: Ranks) -> list[Ranks]:
    return [base[:1]]


def _ends(_: ModelParallelLayout, base: Ranks) -> list[Ranks]:
    return [tuple(sorted({base[0], base[-1]}))]


def _inside(layout: ModelParallelLayout, base: Ranks) -> list[Ranks]:
    """The stretch of each optimizer instance."""
    size = len(base) // layout.num_distributed_optimizer_instances
    return [base[start : start + size] for start in range(0, len(base), size)]


def _across(layout: ModelParallelLayout, base: Ranks) -> list[Ranks]:
    """What stands at one place of every instance, where there are several."""
    stretches = _inside(layout, base)
    return list(zip(*stretches, strict=True)) if len(stretches) > 1 else []


def _instances(layout: ModelParallelLayout, base: Ranks) -> list[Ranks]:
    """All ranks of each instance."""
    experts, found = layout.experts, dict[int, list[int]]()
    size = len(experts.group_of(base[0], "dp")) // layout.num_distributed_optimizer_instances
    for rank in base:
        found.setdefault(experts.coordinate(rank, "dp") // size, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


@dataclass(frozen=True, slots=True)
class GroupKind:
    """One kind of group: ranks that differ in `dims`, of dense layers or of experts, and what `cut`
    makes of those. `meaning`: what they have to do with each other.
    """

    dims: str
    meaning: str
    of_experts: bool = False
    cut: Callable[[ModelParallelLayout, Ranks], list[Ranks]] = _whole


GROUP_KINDS: Mapping[str, GroupKind] = {
    "tp": GroupKind("tp", "parts of the same dense layers"),
    "pp": GroupKind("pp", "stages of a pipeline"),
    "mp": GroupKind("tp-pp", "parts of one copy of the dense layers"),
    "embd": GroupKind("pp", "the first and the last stage, with word embeddings", cut=_ends),
    "pos_embd": GroupKind("pp", "the first stage, with position embeddings", cut=_first),
    "cp": GroupKind("cp", "parts of the same sequences"),
    "tp_cp": GroupKind("tp-cp", "parts of the same layers and sequences"),
    "dp": GroupKind("dp", "other data, the same part of each sequence"),
    "dp_cp": GroupKind("dp-cp", "copies of dense layers, which sum their gradients"),
    "tp_dp": GroupKind("tp-dp", "a pipeline stage, for one part of each sequence"),
    "tp_dp_cp": GroupKind("tp-dp-cp", "a pipeline stage"),
    "ep": GroupKind("ep", "other experts of the same layers", True),
    "expt_tp": GroupKind("tp", "parts of the same experts", True),
    "tp_ep": GroupKind("tp-ep", "parts of all experts of a layer", True),
    "tp_ep_pp": GroupKind("tp-ep-pp", "parts of one copy of the experts", True),
    "expt_dp": GroupKind("dp", "copies of experts, which sum their gradients", True),
    "intra_dp_cp": GroupKind("dp-cp", "dp_cp inside an optimizer instance", cut=_inside),
    "intra_expt_dp": GroupKind("dp", "expt_dp inside an optimizer instance", True, _inside),
    "inter_dist_opt": GroupKind("dp-cp", "replicas in several optimizer instances", cut=_across),
    "intra_dist_opt": GroupKind("tp-cp-dp-pp", "all of an optimizer instance", cut=_instances),
}
"""The groups of a job, by their names in `ProcessGroupCollection`."""


def group_kind(name: str) -> GroupKind:
    """The kind called `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in GROUP_KINDS:
        raise ValueError(f"group: expected one of {list(GROUP_KINDS)}, got {name!r}; use that name")
    return GROUP_KINDS[name]
