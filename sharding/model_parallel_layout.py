"""Which ranks are in which group of a model-parallel job, from sizes and an order of dimensions.
Nothing here communicates.

    dense layers   tp x cp x dp x pp         dp = world_size / (tp x cp x pp)
    experts        etp x ep x expt_dp x pp   expt_dp = world_size / (etp x ep x pp)

The leftmost of `order` varies fastest. Both are factorisations of the same ranks with the same
pipelines. The rules are those of Megatron-Core's `parallel_state`.
"""

from __future__ import annotations

import itertools
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
        pipeline = self.pipeline_model_parallel_size
        if self.virtual_pipeline_model_parallel_size is not None and pipeline == 1:
            raise ValueError(
                "virtual_pipeline_model_parallel_size: expected None without a pipeline, got "
                f"{self.virtual_pipeline_model_parallel_size}; leave it out, or have "
                "pipeline_model_parallel_size above 1"
            )
        tensor, cp = self.tensor_model_parallel_size, self.context_parallel_size
        dense = self._grid("dense layers", {"tp": tensor, "cp": cp, "pp": pipeline})
        tensor, ep = self.expert_tensor_parallel_size or tensor, self.expert_model_parallel_size
        experts = self._grid("experts", {"tp": tensor, "ep": ep, "pp": pipeline})
        object.__setattr__(self, "dense", dense)
        object.__setattr__(self, "experts", experts)
        self._require_same("pipelines", dense.get_rank_enum("pp"), experts.get_rank_enum("pp"))
        copies = dense.get_rank_enum("dp-cp"), experts.get_rank_enum("dp")
        of_dense, of_experts = (len(ranks[0]) for ranks in copies)
        count = self.num_distributed_optimizer_instances
        if of_dense % count or of_experts % count:
            raise ValueError(
                f"num_distributed_optimizer_instances: expected a divisor of the {of_dense} data-"
                f"parallel ranks (dp x cp) and the {of_experts} of experts, got {count}; pass one"
            )
        replicas = [_across(ranks, count) for ranks in copies]
        self._require_same("replicas in optimizer instances", *replicas)

    def groups(self, name: str) -> list[Ranks]:
        """Every group of the kind `name`; in each the ranks ascend.

        Raises:
            ValueError: no such kind.
        """
        kind = group_kind(name)
        whole = (self.experts if kind.of_experts else self.dense).get_rank_enum(kind.dims)
        return kind.cut(whole, self.num_distributed_optimizer_instances)

    def group_of(self, name: str, rank: int) -> Ranks | None:
        """The one of `groups(name)` that `rank` is in, if any.

        Raises:
            ValueError: no such kind.
        """
        return next((group for group in self.groups(name) if rank in group), None)

    def _grid(self, what: str, sizes: dict[str, int]) -> RankGrid:
        """The dimensions of `order` that have a size, and dp, which has the rest of the ranks."""
        product = math.prod(sizes.values())
        if self.world_size % product:
            raise ValueError(
                f"sizes of {what}: expected a product that divides the {self.world_size} ranks, "
                f"got {described(sizes)}; change the sizes or start another number of ranks"
            )
        sizes = {**sizes, "dp": self.world_size // product}
        names = self.order.lower().split("-") if isinstance(self.order, str) else []
        left_out = [name for name in _DIMS if name not in names]
        needed = [f"{name} of size {sizes[name]}" for name in left_out if sizes.get(name, 1) > 1]
        if sorted(names + left_out) != sorted(_DIMS) or needed:
            raise ValueError(
                f"order: expected {', '.join(_DIMS)} joined by '-', each once, got {self.order!r}"
                + (f", which lacks {', '.join(needed)}" if needed else "")
                + "; name every dimension whose size is not 1, the fastest first"
            )
        dims = [name for name in names + left_out if name in sizes]
        return RankGrid([sizes[name] for name in dims], dims, self.rank_offset)

    def _require_same(self, what: str, dense: list[Ranks], experts: list[Ranks]) -> None:
        if different := set(dense) - set(experts):
            raise ValueError(
                f"order: expected one in which dense layers and experts have the same {what}, got "
                f"'{self.order}', with {min(different)} for dense layers, for experts "
                f"{min(set(experts) - set(dense))}; let dp come after tp, cp and ep, and pp last"
            )


Cut = Callable[[list[Ranks], int], list[Ranks]]
"""Makes groups of those along whole dimensions, for so many optimizer instances."""


def _whole(whole: list[Ranks], _: int) -> list[Ranks]:
    return whole


def _first(whole: list[Ranks], _: int) -> list[Ranks]:
    return [ranks[:1] for ranks in whole]


def _ends(whole: list[Ranks], _: int) -> list[Ranks]:
    return [tuple(sorted({ranks[0], ranks[-1]})) for ranks in whole]


def _inside(whole: list[Ranks], count: int) -> list[Ranks]:
    """The stretch of each optimizer instance, in turn."""
    numel = len(whole[0]) // count
    return [ranks[place * numel :][:numel] for ranks in whole for place in range(count)]


def _across(whole: list[Ranks], count: int) -> list[Ranks]:
    """What stands at one place of every instance, where there are several."""
    numel = len(whole[0]) // count
    return [ranks[place::numel] for ranks in whole for place in range(numel)] if count > 1 else []


def _instances(whole: list[Ranks], count: int) -> list[Ranks]:
    """All ranks of each instance."""
    stretches = _inside(whole, count)
    return [tuple(sorted(itertools.chain(*stretches[one::count]))) for one in range(count)]


@dataclass(frozen=True, slots=True)
class GroupKind:
    """One kind of group: ranks that differ in `dims`, of dense layers or of experts, and what `cut`
    makes of those. `meaning`: what they have to do with each other.
    """

    dims: str
    meaning: str
    of_experts: bool = False
    cut: Cut = _whole


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
    "intra_dist_opt": GroupKind("dp", "all of an optimizer instance", True, _instances),
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
