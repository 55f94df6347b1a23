"""What strangers do with Lightning's doors: hooks that edit checkpoints, loggers that upload, copies of Trainers."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, Timer
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning.pytorch.utilities.model_summary import ModelSummary, summarize
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronCheckpointIO, MegatronStrategy
from lightning_megatron.checkpoints.files.sources import open_source
from tests.harness import RankInfo, ReusedProcesses
from tests.parity.train import make_trainer

WIDTH = 8
Sizes = tuple[int, int, int]


class Plain(LightningModule):
    """Four linear layers between two others."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.into = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.into(batch)
        for layer in self.layers:
            x = x + layer(x)
        loss = self.head(x).square().mean() * self.hparams["scale"]
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        data: Any = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return DataLoader(data, batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Edits(Plain):
    """Renames its head, drops one entry, changes another, and starts its optimizer afresh."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.more = self.head, nn.Linear(2, 2)
        del self.head

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.head = self.last
        loss = super().training_step(batch, batch_idx)
        del self.head
        return loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in ("weight", "bias"):
            state[f"last.{name}"] = state.pop(f"head.{name}")
            state[f"more.{name}"] = getattr(self.more, name).detach() * 0 + 7
        state["layers.1.0.weight"] = state["layers.1.0.weight"] * 2 + 1
        checkpoint["optimizer_states"] = []


def edited(info: RankInfo, sizes: Sizes) -> list[str]:
    """Names of loaded weights that are not what the hook made of the saved ones."""
    path = f"{info.directory}/plain.ckpt"
    trainer = make_trainer(info, MegatronStrategy(*sizes), max_steps=1)
    trainer.fit(Plain())
    trainer.save_checkpoint(path)
    strategy = MegatronStrategy(*sizes)
    trainer = make_trainer(info, strategy, max_steps=1)  # as many as were taken: nothing is trained
    trainer.fit(Edits(), ckpt_path=path)
    assert not trainer.optimizers[0].state
    state, source = strategy.full_state_dict(), open_source(path)
    saved = {name: source.read(name) for name in source.kinds if not name.startswith("optimizer.")}
    saved["layers.1.0.weight"] = saved["layers.1.0.weight"] * 2 + 1
    renamed = {name.replace("head.", "last."): value for name, value in saved.items()}
    for name in ("more.weight", "more.bias"):
        renamed[name] = torch.full_like(state.get(name, torch.zeros(2)), 7)
    return [name for name, value in renamed.items() if state and not torch.equal(state[name], value)]


class Looks(Plain):
    """Computes with what is loaded, as a hook in one process may."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for state in checkpoint["optimizer_states"]:
            for entries in state["state"].values():
                for key, value in entries.items():
                    entries[key] = value * 1
        checkpoint["state_dict"] = {name: value + 1 for name, value in checkpoint["state_dict"].items()}


def looked_at(info: RankInfo) -> float:
    """Largest difference between loaded weights, one added by a hook, and saved ones, at one device."""
    path = f"{info.directory}/plain.ckpt"
    trainer = make_trainer(info, MegatronStrategy(), max_steps=1)
    module = Plain()
    trainer.fit(module)
    trainer.save_checkpoint(path)
    loaded = Looks()
    make_trainer(info, MegatronStrategy(), max_steps=1).fit(loaded, ckpt_path=path)
    before, after = module.state_dict(), loaded.state_dict()
    return max(float((after[name] - before[name] - 1).abs().max()) for name in before)


def bytes_of_the_whole_state(info: RankInfo, sizes: Sizes) -> tuple[int, int]:
    """Length of the saved whole state on rank 0, and of its elements."""
    strategy = MegatronStrategy(*sizes)
    make_trainer(info, strategy, max_steps=1).fit(Plain())
    state, buffer = strategy.full_state_dict(), io.BytesIO()
    torch.save(state, buffer)
    return len(buffer.getvalue()), sum(value.nbytes for value in state.values())


class _Run:
    """Notes what a logger uploads: which files are there at that moment."""

    def __init__(self) -> None:
        self.uploads: list[tuple[str, list[str]]] = []
        self.id = "run"

    def note(self, name: str, path: Any) -> None:
        self.uploads.append((name, sorted(each.name for each in Path(path).iterdir())))

    def log_artifact(self, *args: Any, **kwargs: Any) -> None:
        if len(args) == 3:  # MLflow's: run, path, folder
            self.note(str(args[2]), args[1])

    def log_artifacts(self, *args: Any) -> None:
        pass


class _Artifact:
    """As far as Lightning uses W&B's."""

    run: _Run

    def __init__(self, **options: Any) -> None:
        pass

    def add_file(self, local_path: str, name: str | None = None, policy: Any = None) -> None:
        assert Path(local_path).is_file(), local_path

    def add_dir(self, local_path: str, name: str | None = None) -> None:
        self.run.note(str(name), local_path)


class Wandb(WandbLogger):
    """Without a server."""

    def __init__(self, run: _Run, log_model: Any) -> None:
        self._logged_model_time: dict[str, float] = {}
        self._checkpoint_callbacks: dict[int, Any] = {}
        self._log_model, self._experiment, self._checkpoint_name = log_model, run, "model"  # type: ignore[assignment]
        self.add_file_policy = "mutable"

    experiment = property(lambda self: self._experiment)  # type: ignore[assignment]
    name = version = save_dir = property(lambda self: "x")  # type: ignore[assignment]

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    log_hyperparams = log_graph = save = log_metrics  # type: ignore[assignment]


class MLFlow(MLFlowLogger):
    """Without a server."""

    def __init__(self, run: _Run, log_model: Any) -> None:
        self._logged_model_time: dict[str, float] = {}
        self._log_model, self._run, self._run_id, self._checkpoint_callback = log_model, run, "run", None
        self._initialized = True

    experiment = property(lambda self: self._run)  # type: ignore[assignment]
    name = version = save_dir = property(lambda self: "x")  # type: ignore[assignment]

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    log_hyperparams = log_graph = save = log_metrics  # type: ignore[assignment]

    def finalize(self, status: str = "success") -> None:
        if self._checkpoint_callback:
            self._scan_and_log_checkpoints(self._checkpoint_callback)


def uploaded(info: RankInfo, kind: Callable[[_Run, Any], Any], log_model: Any, behind: bool) -> list[Any]:
    """What was uploaded, in order."""
    run = _Run()
    _Artifact.run = run
    sys.modules["wandb"] = SimpleNamespace(Artifact=_Artifact)  # type: ignore[assignment]
    try:
        saves = ModelCheckpoint(f"{info.directory}/saved", "{step}", save_top_k=-1, every_n_train_steps=1)
        saves.save_top_k = 2 if log_model is True else -1
        logger = kind(run, log_model)
        plugins = [ReusedProcesses(info), MegatronCheckpointIO(async_save=behind)]
        options = {"enable_checkpointing": True, "logger": logger, "callbacks": [saves], "plugins": plugins}
        make_trainer(info, MegatronStrategy(), max_steps=2, **options).fit(Plain())
        assert "_scan_and_log_checkpoints" not in logger.__dict__, "the logger has its own method back"
        return run.uploads
    finally:
        del sys.modules["wandb"]


class Meets(Callback):
    """Notes what a fit meets at its start: how many steps the callback has counted, and the sum of a weight."""

    def __init__(self) -> None:
        self.steps, self.met = 0, [0.0, 0.0]

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        weights = dict(module.named_parameters()).get("head.weight", torch.zeros(0))  # of this stage
        self.met = [self.steps, float(weights.detach().abs().sum())]

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def met_at_the_start(info: RankInfo, sizes: Sizes | None) -> list[float]:
    """What the start of a resumed fit meets, of a checkpoint with a hyperparameter that is not plain data."""
    warnings.simplefilter("ignore")  # both say that the checkpoint holds such a thing
    path = f"{info.directory}/met.ckpt"
    found = Meets()
    for resumes, callback in ((None, Meets()), (path, found)):
        strategy: Any = "auto" if sizes is None else MegatronStrategy(*sizes)
        options = {"precision": "64-true", "max_steps": 2 if resumes else 1, "callbacks": [callback]}
        trainer = make_trainer(info, strategy, **options)
        module = Plain().double()  # one process converts a module only after it has loaded: that rounds to float32
        module.save_hyperparameters({"folder": Path("data")})
        trainer.fit(module, ckpt_path=resumes, weights_only=False)
        trainer.save_checkpoint(path)
    return found.met


def out_of_time(info: RankInfo) -> int:
    """Steps of a run that is resumed with a Timer whose time the run that was saved has used up."""
    path = f"{info.directory}/timed.ckpt"
    trainer = make_trainer(info, MegatronStrategy(), max_steps=1, callbacks=[Timer(timedelta(hours=1))])
    trainer.fit(Plain())
    trainer.save_checkpoint(path)
    trainer = make_trainer(info, MegatronStrategy(), max_steps=4, callbacks=[Timer(timedelta(milliseconds=1))])
    trainer.fit(Plain(), ckpt_path=path)
    return trainer.global_step


class Copies(Callback):
    """Copies the Trainer and the module while they run."""

    def __init__(self) -> None:
        self.copies: list[tuple[Trainer, LightningModule]] = []
        self.bytes: list[int] = []
        self.refusals: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"copies": [], "bytes": [], "refusals": []}

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.on_train_batch_end(trainer, module)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        saved = io.BytesIO()
        for save in (pickle.dumps, lambda value: torch.save(value, saved)):
            for value in (trainer, module):
                try:
                    found = save(value)
                except pickle.PicklingError as error:
                    self.refusals.append(str(error))
                else:
                    self.bytes.append(len(found or b""))
        if not self.refusals:
            self.copies += [copy.deepcopy((trainer, module)), pickle.loads(pickle.dumps((trainer, module)))]
        for _, part in self.copies[-2:]:
            assert part.log.__func__ is LightningModule.log  # type: ignore[attr-defined]
            ours, theirs = module.state_dict(), part.state_dict()
            assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def copied_meanwhile(info: RankInfo, sizes: Sizes) -> tuple[list[int], list[float]]:
    """Steps that copies of a running Trainer take, and the sizes of a module's and of its weights' pickles."""
    callback, module = Copies(), Plain()
    trainer = make_trainer(info, MegatronStrategy(*sizes), max_steps=1, callbacks=[callback])
    trainer.fit(module)
    callback.on_train_batch_end(trainer, module)
    steps = []
    for twin, part in callback.copies:
        twin.fit_loop.epoch_loop.max_steps = 3
        twin.fit(part)
        steps.append(twin.global_step)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return steps, [max(callback.bytes[1::4]), len(pickle.dumps(weights))]


def refused_to_pickle(info: RankInfo, sizes: Sizes) -> list[str]:
    """What pickling a divided module, or its Trainer, says while they run and afterwards."""
    callback, module = Copies(), Plain()
    trainer = make_trainer(info, MegatronStrategy(*sizes), max_steps=1, callbacks=[callback])
    trainer.fit(module)
    callback.on_train_batch_end(trainer, module)
    assert not callback.bytes
    return callback.refusals


def copied(info: RankInfo) -> list[float]:
    """Steps that copies of a Trainer take: a pickled one, a deep copy, and one of its callbacks alone."""
    trainer = make_trainer(info, MegatronStrategy(), max_steps=1)
    given = list(trainer.callbacks)
    trainer.fit(Plain())
    assert info.world_size > 1 or trainer.callbacks == given, "nothing of ours where there is nobody to tell"
    found = []
    for twin in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        twin.fit_loop.epoch_loop.max_steps = 2
        twin.fit(Plain())
        found.append(twin.global_step)
    assert len(pickle.loads(pickle.dumps(trainer.callbacks))) == len(trainer.callbacks)
    return found


class Summarizes(Callback):
    """Notes what a summary counts: by layer, all, those that are trained."""

    def __init__(self, divided: bool) -> None:
        self.found: list[Any] = []
        self.divided = divided

    def look(self, module: LightningModule) -> None:
        for summary in (summarize(module, max_depth=-1), ModelSummary(module, max_depth=1)):
            self.found += [list(zip(summary.layer_names, summary.param_nums, strict=True)), summary.total_parameters]
            self.found += [summary.trainable_parameters, "In sizes" in str(summary)]

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if self.divided:  # its forward must not be run
            module.example_input_array = torch.zeros(1, WIDTH)
        self.look(module)
        assert not self.divided or module.example_input_array is not None

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.look(module)


def summarized(info: RankInfo, sizes: Sizes | None) -> list[Any]:
    """What summaries count before a fit and in hooks, and of a module that is whole; they are Lightning's own after."""
    before = dict(vars(ModelSummary))
    looks, module, whole = Summarizes(divided=sizes is not None), Plain(), Plain()
    for each in (module, whole):
        each.head.bias.requires_grad_(False)
    looks.look(module)
    strategy: Any = "auto" if sizes is None else MegatronStrategy(*sizes)
    trainer = make_trainer(
        info, strategy, max_steps=1, callbacks=[looks, LambdaCallback(on_train_end=lambda *_: looks.look(whole))]
    )
    trainer.fit(module)
    assert dict(vars(ModelSummary)) == before, "given back"
    looks.look(copy.deepcopy(whole))
    copy.deepcopy(module)
    return looks.found
