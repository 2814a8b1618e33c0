"""Tests of Lightning's Trainer over sharded models, beside its DDP strategy."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sidestream as ss
from sidestream.tests.integrations.launched import as_if_launched
from sidestream.tests.ranks import RanksFailed, preload, run_on_ranks

lightning = pytest.importorskip("lightning", reason="needs the extra `examples`")
pytestmark = pytest.mark.slow
preload("lightning.pytorch")
# Of one rank the levels differ by whether parameters are freed alone.
LEVELS = {1: (3,), 2: range(4), 3: (1,)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Regression(lightning.LightningModule):
    """`scale` is the root's own parameter, used in the step itself, before and after forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 1))
        self.scale = nn.Parameter(torch.ones(3))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale.sum()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0] * self.scale[0]), batch[1])
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


class Game(Regression):
    """Two optimizers, stepped by hand in turn, each with part of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()[index % 2]
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.seen.append(loss.item())

    def configure_optimizers(self) -> Any:
        halves = (self.net[:2], self.net[2:])
        return [torch.optim.Adam(half.parameters(), lr=1e-2) for half in halves]


def _data(batch_size: int = 4) -> Any:
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size)


def _trainer(
    folder: Path,
    world_size: int,
    zero: int | None,
    *,
    elementwise: bool = False,
    sharding: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """With SidestreamStrategy at ZeRO level `zero`, or with DDP for None."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from sidestream.integrations.lightning import SidestreamStrategy

    sharding = {**(sharding or {}), "zero_dp_strategy": zero, "elementwise": elementwise}
    sharding["fsdp_unit_modules"] = [Block]
    return lightning.Trainer(
        strategy="ddp" if zero is None else SidestreamStrategy(**sharding),
        accelerator="cpu",
        devices=world_size,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1, enable_version_counter=False)],
        **options,
    )


def _check_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=name)


def _check_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def _trains_and_resumes(rank: int, world_size: int, folder: Path) -> None:
    as_if_launched(rank, world_size)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    plain = Regression()
    trainer = _trainer(folder / "plain", world_size, None, **options)
    trainer.fit(plain, _data(), _data())
    expected = trainer.callback_metrics["val"]
    for zero in LEVELS[world_size]:
        model = Regression()
        trainer = _trainer(folder / f"{zero}", world_size, zero, **options)
        trainer.fit(model, _data(), _data())
        torch.testing.assert_close(model.seen, plain.seen, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(trainer.callback_metrics["val"], expected, rtol=1e-5, atol=1e-6)
        weights = ss.full_state_dict(model)
        _check_close(weights, plain.state_dict())
        # At another level than it was saved at.
        again = Regression()
        resumed = _trainer(folder / "again", world_size, 3 - zero, **options)
        resumed.fit(again, _data(), _data(), ckpt_path=folder / f"{zero}" / "epoch=0.ckpt")
        _check_equal(ss.full_state_dict(again), weights)
        assert again.seen == model.seen[len(model.seen) // 2 :]
        # Without sharding, and evaluated in a new Trainer.
        last = folder / f"{zero}" / "epoch=1.ckpt"
        _check_equal(Regression.load_from_checkpoint(last).state_dict(), weights)
        tester = _trainer(folder / "test", world_size, zero)
        (metrics,) = tester.test(Regression(), _data(), ckpt_path=last, verbose=False)
        torch.testing.assert_close(metrics["val"], expected.item(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3], ids="world{}".format)
def test_trains_saves_and_resumes_as_ddp_does(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(_trains_and_resumes, world_size, tmp_path)


def _plays(rank: int, world_size: int, folder: Path) -> None:
    as_if_launched(rank, world_size)
    plain = Game()
    _trainer(folder / "plain", world_size, None).fit(plain, _data())
    for zero in (0, 3):
        game = Game()
        _trainer(folder / f"{zero}", world_size, zero).fit(game, _data())
        torch.testing.assert_close(game.seen, plain.seen, rtol=1e-5, atol=1e-6)
        _check_close(ss.full_state_dict(game), plain.state_dict())
        again = Game()
        resumed = _trainer(folder / "again", world_size, zero)
        resumed.fit(again, _data(), ckpt_path=folder / f"{zero}" / "epoch=0.ckpt")
        _check_equal(ss.full_state_dict(again), ss.full_state_dict(game))


def test_optimizers_stepped_by_hand_train_and_resume(tmp_path: Path) -> None:
    run_on_ranks(_plays, 2, tmp_path)


def _autocasts(rank: int, world_size: int, folder: Path) -> None:
    as_if_launched(rank, world_size)
    plain = Regression()
    _trainer(folder / "plain", world_size, None, precision="bf16-mixed").fit(plain, _data())
    for zero in (0, 3):
        model = Regression()
        _trainer(folder / f"{zero}", world_size, zero, precision="bf16-mixed").fit(model, _data())
        torch.testing.assert_close(model.seen, plain.seen, rtol=1e-5, atol=1e-6)


def test_bf16_mixed_is_lightnings_own_autocast(tmp_path: Path) -> None:
    run_on_ranks(_autocasts, 2, tmp_path)


class Watched(torch.optim.AdamW):
    """Notes what it steps over; sidestream has to be told that it is elementwise."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.stepped = [param for group in self.param_groups for param in group["params"]]
        super().step()
        return loss


class Watching(Regression):
    def configure_optimizers(self) -> Any:
        return Watched(self.parameters(), lr=1e-2)


def _steps_over_flat_parameters(rank: int, world_size: int, folder: Path) -> None:
    as_if_launched(rank, world_size)
    plain = Watching()
    _trainer(folder / "plain", world_size, None).fit(plain, _data())
    for zero in (0, 3):
        unknown = Watching()
        with pytest.raises(ValueError, match=r"Watched.*elementwise=True"):
            _trainer(folder / "unknown", world_size, zero).fit(unknown, _data())
        _check_equal(ss.full_state_dict(unknown), Regression().state_dict())
        model = Watching()
        trainer = _trainer(folder / f"{zero}", world_size, zero, elementwise=True)
        trainer.fit(model, _data())
        stepped = trainer.optimizers[0].stepped
        assert all(type(param) is nn.Parameter and param.dim() == 1 for param in stepped)
        assert len(stepped) == 3, "one for each unit: two blocks and the root"
        _check_close(ss.full_state_dict(model), plain.state_dict())


def test_optimizers_are_vouched_for_and_step_over_flat_parameters(tmp_path: Path) -> None:
    run_on_ranks(_steps_over_flat_parameters, 2, tmp_path)


def _keeps_one(rank: int, world_size: int, folder: Path) -> list[str]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    as_if_launched(rank, world_size)
    trainer = _trainer(folder / "all", world_size, 3)
    trainer.callbacks = [ModelCheckpoint(folder / "one", "{epoch}", save_top_k=1)]
    trainer.fit(Regression(), _data())
    trainer.save_checkpoint(folder / "one" / "weights.ckpt", weights_only=True)
    return sorted(path.name for path in (folder / "one").iterdir())


def test_a_checkpoint_is_removed_with_what_lies_beside_it(tmp_path: Path) -> None:
    expected = ["epoch=1.ckpt", "epoch=1.ckpt.sidestream", "weights.ckpt"]
    assert run_on_ranks(_keeps_one, 2, tmp_path) == [expected, expected]


def _refused(rank: int, world_size: int, folder: Path) -> list[str]:
    as_if_launched(rank, world_size)
    _trainer(folder / "plain", world_size, None).fit(Regression(), _data())
    _trainer(folder / "3", world_size, 3).fit(Regression(), _data())
    torn = folder / "3" / "epoch=0.ckpt.sidestream"
    if rank == 0:
        shutil.rmtree(torn)
        shutil.copytree(folder / "3" / "epoch=1.ckpt.sidestream", torn)
    torch.distributed.barrier()
    messages = []
    for path in (folder / "plain" / "epoch=0.ckpt", folder / "3" / "epoch=0.ckpt"):
        with pytest.raises(ValueError) as caught:
            _trainer(folder / "again", world_size, 3).fit(Regression(), _data(), ckpt_path=path)
        messages.append(str(caught.value))
    return messages


def test_foreign_and_torn_checkpoints_are_refused(tmp_path: Path) -> None:
    for foreign, torn in run_on_ranks(_refused, 2, tmp_path):
        assert "another strategy wrote" in foreign
        assert "saving was interrupted" in torn


def _shards_over_some(rank: int, world_size: int, folder: Path, samples: bool) -> str:
    as_if_launched(rank, world_size)
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    options = {"device_mesh": mesh, "dp_shard_dim": "dp"}
    trainer = _trainer(folder, world_size, 3, sharding=options, use_distributed_sampler=samples)
    trainer.callbacks = []  # every model of a job has a path of its own for checkpoints
    model = Regression()
    try:
        trainer.fit(model, _data())
    except ValueError as error:
        return str(error)
    return f"{len(model.seen)} steps"


@pytest.mark.parametrize(
    ("samples", "outcome"),
    [(True, "dimensions of all 2 ranks.*got 1; pass Trainer"), (False, "24 steps")],
    ids=["Lightning samples", "we sample"],
)
def test_data_are_not_shared_among_ranks_that_need_the_same(
    samples: bool, outcome: str, tmp_path: Path
) -> None:
    for got in run_on_ranks(_shards_over_some, 2, tmp_path, samples):
        assert re.search(outcome, got), got


def _names_the_package(rank: int, world_size: int) -> None:
    import sys

    sys.modules["lightning.pytorch.strategies"] = None  # type: ignore[assignment]
    import sidestream.integrations.lightning  # noqa: F401


def test_missing_package_is_named() -> None:
    with pytest.raises(RanksFailed, match=r"pip install 'sidestream\[examples\]'"):
        run_on_ranks(_names_the_package, 1, backend=None)
