"""Which ranks are in which group of a model-parallel job, from sizes and an order of dimensions.
Nothing here communicates.

    dense layers   tp x cp x dp x pp         dp = world_size / (tp x cp x pp)
    experts        etp x ep x expt_dp x pp   expt_dp = world_size / (etp x ep x pp)

The leftmost of `order` varies fastest. Both are factorisations of the same ranks with the same
pipeline stages. The rules are those of Megatron-Core's `parallel_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .rank_grid import RankGrid, require_count

EXPERT = "expert"
"""The view of the grid that experts lie in."""
_DIMS = ("tp", "cp", "ep", "dp", "pp")
_Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupKind:
    """One kind of group. `dims`: along which its ranks differ, of the grid or of its `view`; `cut`
    makes groups of those. `meaning`: what its ranks have to do with each other. `unset`: when there
    is none.
    """

    dims: str
    meaning: str
    view: str | None = None
    cut: Callable[[ModelParallelLayout, _Ranks], list[_Ranks]] | None = None
    unset: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelParallelLayout:
    """Sizes of all dimensions; the job's ranks from `rank_offset` on are `world_size` many.

    virtual_pipeline_model_parallel_size: how many parts of the model a stage has, which changes no
    group. expert_tensor_parallel_size: None for that of dense layers.
    num_distributed_optimizer_instances: parts of the data-parallel ranks that hold copies of each
    other's optimizer shards: contiguous stretches of `dp_cp` and of `expt_dp`. order: dimensions
    joined by "-"; those of size 1 may be left out. get_embedding_ranks,
    get_position_embedding_ranks: from the ranks of a pipeline to those with (position) embeddings;
    None: the first and the last, the first.

    Raises:
        TypeError: a size is no whole number.
        ValueError: a size below 1, sizes whose product does not divide `world_size`, an order
            without a dimension, or in which dense layers and experts would not share pipelines or
            instances.
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
    get_embedding_ranks: Callable[[_Ranks], Sequence[int]] | None = field(default=None, repr=False)
    get_position_embedding_ranks: Callable[[_Ranks], Sequence[int]] | None = field(
        default=None, repr=False
    )
    grid: RankGrid = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        virtual = self.virtual_pipeline_model_parallel_size
        expert_tensor = self.expert_tensor_parallel_size
        sizes = {
            "world_size": self.world_size,
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "context_parallel_size": self.context_parallel_size,
            "expert_model_parallel_size": self.expert_model_parallel_size,
            "expert_tensor_parallel_size": tensor if expert_tensor is None else expert_tensor,
            "virtual_pipeline_model_parallel_size": 1 if virtual is None else virtual,
            "num_distributed_optimizer_instances": self.num_distributed_optimizer_instances,
        }
        for name, size in sizes.items():
            require_count(name, size)
        if virtual is not None and pipeline == 1:
            raise ValueError(
                "virtual_pipeline_model_parallel_size: expected None without a pipeline, got "
                f"{virtual}; leave it out or have pipeline_model_parallel_size above 1"
            )
        dense = _with_data(
            {"tp": tensor, "cp": self.context_parallel_size, "pp": pipeline},
            self.world_size,
            "dense layers",
        )
        experts = _with_data(
            {
                "tp": sizes["expert_tensor_parallel_size"],
                "ep": self.expert_model_parallel_size,
                "pp": pipeline,
            },
            self.world_size,
            "experts",
        )
        largest = {name: max(dense.get(name, 1), experts.get(name, 1)) for name in _DIMS}
        names = _ordered(self.order, largest)
        of_dense, of_experts = ([name for name in names if name in of] for of in (dense, experts))
        grid = RankGrid([dense[name] for name in of_dense], of_dense, self.rank_offset)
        grid.register_view(EXPERT, [experts[name] for name in of_experts], of_experts, ("pp",))
        object.__setattr__(self, "grid", grid)
        self._require_instances(dense["dp"] * dense["cp"], experts["dp"])

    def groups(self, name: str) -> list[_Ranks]:
        """Every group of the kind `name`, a key of `GROUP_KINDS`; in each the ranks ascend.

        Raises:
            ValueError: no such kind.
        """
        kind = kind_of_group(name)
        found = self.grid.get_rank_enum(kind.dims, view=kind.view)
        return (
            found if kind.cut is None else [one for base in found for one in kind.cut(self, base)]
        )

    def group_of(self, name: str, rank: int) -> _Ranks | None:
        """The one of `groups` that `rank` is in, if any.

        Raises:
            ValueError: no such kind.
        """
        kind = kind_of_group(name)
        base = self.grid.factorisation(kind.view).group_of(rank, kind.dims)
        found = [base] if kind.cut is None else kind.cut(self, base)
        return next((one for one in found if rank in one), None)

    def _require_instances(self, dense: int, experts: int) -> None:
        """dense, experts: how many data-parallel ranks there are."""
        count = self.num_distributed_optimizer_instances
        if count == 1:
            return
        if dense % count or experts % count:
            raise ValueError(
                "num_distributed_optimizer_instances: expected a number that divides the "
                f"{dense} data-parallel ranks (dp x cp) and the {experts} of experts, got {count}; "
                "pass a divisor of both"
            )
        across = [
            {
                one
                for base in self.grid.get_rank_enum(dims, view=view)
                for one in _across(self, base)
            }
            for dims, view in (("dp-cp", None), ("dp", EXPERT))
        ]
        if across[0] != across[1]:
            raise ValueError(
                "order: expected one in which dense layers and experts are cut into the same "
                f"{count} optimizer instances, got '{self.order}', where replicas of dense layers "
                f"are {min(across[0])} and so on, those of experts {min(across[1])}; let dp come "
                "after tp, cp and ep"
            )


def _with_data(sizes: Mapping[str, int], world_size: int, what: str) -> dict[str, int]:
    """`sizes` and that of dp, by which their product is `world_size`."""
    product = math.prod(sizes.values())
    if world_size % product:
        asked = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"world_size: expected a multiple of {asked} = {product} for {what}, got {world_size}; "
            "change the sizes or start another number of ranks"
        )
    return {**sizes, "dp": world_size // product}


def _ordered(order: object, sizes: Mapping[str, int]) -> list[str]:
    """The dimensions of `order`, the fastest first, and those of size 1 that it leaves out."""
    names = order.lower().split("-") if isinstance(order, str) else []
    left_out = [name for name in _DIMS if name not in names]
    needed = [f"{name} (size {sizes[name]})" for name in left_out if sizes[name] > 1]
    if len(set(names)) != len(names) or not set(names) <= set(_DIMS) or not names or needed:
        raise ValueError(
            f"order: expected {', '.join(_DIMS)} joined by '-', each once, got {order!r}"
            + (f", without {', '.join(needed)}" if needed else "")
            + "; name every dimension whose size is not 1, the fastest first"
        )
    return names + left_out


def _inside(layout: ModelParallelLayout, base: _Ranks) -> list[_Ranks]:
    """The stretches of `base` that are in one optimizer instance each."""
    size = len(base) // layout.num_distributed_optimizer_instances
    return [base[start : start + size] for start in range(0, len(base), size)]


def _across(layout: ModelParallelLayout, base: _Ranks) -> list[_Ranks]:
    """The ranks of `base` that stand at one place of every instance."""
    count = layout.num_distributed_optimizer_instances
    return list(zip(*_inside(layout, base), strict=True)) if count > 1 else []


def _instances(layout: ModelParallelLayout, base: _Ranks) -> list[_Ranks]:
    """All ranks of each instance, those of every pipeline stage."""
    experts = layout.grid.factorisation(EXPERT)
    each = experts.shape[experts.dim_names.index("dp")]
    each //= layout.num_distributed_optimizer_instances
    found: dict[int, list[int]] = {}
    for rank in base:
        found.setdefault(experts.coordinate(rank, "dp") // each, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _embedding(layout: ModelParallelLayout, base: _Ranks) -> list[_Ranks]:
    chosen = layout.get_embedding_ranks
    return [_chosen(base, (base[0], base[-1]) if chosen is None else chosen(base))]


def _position_embedding(layout: ModelParallelLayout, base: _Ranks) -> list[_Ranks]:
    chosen = layout.get_position_embedding_ranks
    return [_chosen(base, (base[0],) if chosen is None else chosen(base))]


def _chosen(base: _Ranks, ranks: Sequence[int]) -> _Ranks:
    if not ranks or not set(ranks) <= set(base):
        raise ValueError(
            f"get_embedding_ranks: expected some of the pipeline's ranks {base}, got {ranks!r}; "
            "return ranks of the pipeline that it is given"
        )
    return tuple(sorted(set(ranks)))


_MIDDLE = "only the first and the last pipeline stage (get_embedding_ranks) are in one"
_ONE_INSTANCE = "there is one where num_distributed_optimizer_instances is above 1"

GROUP_KINDS: Mapping[str, GroupKind] = {
    "tp": GroupKind("tp", "parts of the same dense layers"),
    "pp": GroupKind("pp", "the stages of one pipeline"),
    "mp": GroupKind("tp-pp", "all parts of one copy of the model"),
    "embd": GroupKind("pp", "stages with word embeddings", cut=_embedding, unset=_MIDDLE),
    "pos_embd": GroupKind(
        "pp",
        "stages with position embeddings",
        cut=_position_embedding,
        unset="only the first pipeline stage (get_position_embedding_ranks) is in one",
    ),
    "cp": GroupKind("cp", "parts of the same sequences"),
    "tp_cp": GroupKind("tp-cp", "parts of the same layers and sequences"),
    "dp": GroupKind("dp", "other data, with the same part of each sequence"),
    "dp_cp": GroupKind("dp-cp", "over which gradients of dense layers are summed"),
    "tp_dp": GroupKind("tp-dp", "tp and dp together"),
    "tp_dp_cp": GroupKind("tp-dp-cp", "all ranks of a pipeline stage"),
    "ep": GroupKind("ep", "other experts of the same layers", EXPERT),
    "expt_tp": GroupKind("tp", "parts of the same experts", EXPERT),
    "tp_ep": GroupKind("tp-ep", "all parts of the experts of a layer", EXPERT),
    "tp_ep_pp": GroupKind("tp-ep-pp", "all parts of one copy of the experts", EXPERT),
    "expt_dp": GroupKind("dp", "over which gradients of experts are summed", EXPERT),
    "intra_dp_cp": GroupKind("dp-cp", "dp_cp inside one optimizer instance", cut=_inside),
    "intra_expt_dp": GroupKind("dp", "expt_dp inside one optimizer instance", EXPERT, _inside),
    "inter_dist_opt": GroupKind(
        "dp-cp", "the same shard in every optimizer instance", cut=_across, unset=_ONE_INSTANCE
    ),
    "intra_dist_opt": GroupKind("tp-cp-dp-pp", "all of one optimizer instance", cut=_instances),
}
"""The groups of a job, by their names in `ProcessGroupCollection`."""


def kind_of_group(name: str) -> GroupKind:
    """The kind called `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in GROUP_KINDS:
        raise ValueError(f"group: expected one of {list(GROUP_KINDS)}, got {name!r}; use that name")
    return GROUP_KINDS[name]
