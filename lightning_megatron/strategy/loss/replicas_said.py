"""Messages to the user about replicas: how their losses come together, and what each has of its own samples alone."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_megatron.strategy.loss.said import with_lines
from lightning_megatron.strategy.loss.tables import Name, spelled
from lightning_megatron.strategy.loss.weighing import Finding, Reading

_NAMED = 4  # values that a warning lists


def warn_of_untried(replicas: int) -> None:
    """Say that nothing of a batch can be tried by itself.

    Args:
        replicas: how many there are.
    """
    rank_zero_warn(
        "a batch cannot be cut into samples, nor joined with that of another replica (their lengths differ, or whole "
        "numbers in it may point at samples), so it is not known what the loss of `training_step` is a mean over. The "
        f"{replicas} replicas count the same, as under DDP, where one process may weigh them by their tokens or nodes: "
        "pass `micro_batch_loss_weight=...`, which counts them, or `whole_batch_loss=False` if the same is meant."
    )


def say_untried_by_hand(replicas: int) -> None:
    """Say that steps of manual optimization, which update in their middle, are not tried.

    Args:
        replicas: how many there are.
    """
    rank_zero_info(
        f"`automatic_optimization=False`: losses of the {replicas} replicas count the same, as under DDP. That is one "
        "process for means over samples; a mean over counted targets, pairs within a batch, or a scale made of a "
        "gradient differs, and is not looked for in steps that update in their middle. `whole_batch_loss=False` says "
        "that each replica's own is meant."
    )


def warn_of_own_gradients(line: str, replicas: int) -> None:
    """Say that a step of manual optimization makes something of a gradient of its replica's samples.

    Args:
        line: of the user's code that takes it.
        replicas: how many there are.
    """
    rank_zero_warn(
        f"the step takes gradients with respect to parameters itself (`torch.autograd.grad` in {line}). Each of the "
        f"{replicas} replicas has those of its own samples, and scales its losses by them, say, where one process has "
        "those of all. Put them together, `g = self.all_gather(g).mean(0)`, and pass `whole_batch_loss=False`, which "
        "says so, or that each replica's own are meant."
    )


def warn_of_padding(length: int, padded: float, alone: float, replicas: int) -> None:
    """Say that the loss depends on how long a batch is padded.

    Args:
        length: of the batch.
        padded: the loss of a sample that is as long as the batch.
        alone: the loss of the same sample without padding.
        replicas: how many there are.
    """
    rank_zero_warn(
        f"the loss of `training_step` is {padded:.6g} for a sample that is padded to {length}, as its batch is, "
        f"and {alone:.6g} without that padding. Each of the {replicas} replicas pads its samples to the longest of its "
        "own, where one process pads to the longest of all. Divide by what counts (`mask.sum()`, not `numel()` or "
        "`.mean()` over padding, too), give the layers a mask, or pad all batches to one length; "
        "`whole_batch_loss=False` says that each replica's own is meant."
    )


def say_written_by_all(names: Iterable[Name], replicas: int) -> None:
    """Say that a pass on the samples of all replicas goes before each step.

    Args:
        names: of values that the step writes from its samples, and goes on from.
        replicas: how many there are.
    """
    rank_zero_info(
        f"`training_step` writes {_listed(names)} from the samples of a batch and goes on from it. So that each of the "
        f"{replicas} replicas goes on from what one process writes, each step runs once more before, forward only, on "
        "the samples of all replicas. What the replicas gather themselves (`self.all_gather(x)`) needs no such pass; "
        "`whole_batch_loss=False` leaves each replica its own."
    )


def warn_of_replicas(
    before: Reading,
    found: Finding,
    now: Reading,
    replicas: int,
    module: nn.Module,
    own: Iterable[Name],
    cut: bool,
    routes: bool,
) -> None:
    """Say what of a step is that of a replica, and not of all samples as in one process; each of it once.

    Args:
        before: what was known before the trial.
        found: by it.
        now: what is known with it.
        replicas: how many there are.
        module: the user's.
        own: names of values that the step writes otherwise on each replica, and that were not said before.
        cut: whether the batch runs in micro-batches, of which the same is said.
        routes: whether the trial cannot tell: mixtures of experts have balancing losses, which are judged by gradients,
            and what layers keep of each sample of a batch does not fit a part of it.
    """
    modules, mine = dict(module.named_modules()), list(own)
    norms = [name for name, child in modules.items() if isinstance(child, _BatchNorm) and child.training]
    values = [name for name in mine if not isinstance(modules.get(name[0]), _BatchNorm)]
    unlike = (not now.fits and before.fits) or not before.tried
    mixes = unlike and not (now.fits or found.gathers or found.draws)
    if norms and (mixes or len(values) < len(mine)):
        rank_zero_warn(_of_norm(norms[0], modules[norms[0]], replicas))
    elif (found.opaque and not now.tells_replicas) or (mixes and (found.failed or routes)):
        rank_zero_info(_of_nothing_known(found.failed, replicas))
    elif mixes:
        rank_zero_warn(_of_mixed_samples(*found.numbers, replicas))
    elif (not cut or now.whole) and now.tells_replicas and now.way != (before.way if before.fits else None):
        rank_zero_info(_of_way(now.way, replicas))
    bends = now.bends is not None and now.bends.kind != "decision"  # which may be about what is kept, told apart below
    if bends and now.fits and not (before.bends or now.stays or found.gathers):
        rank_zero_warn(_of_bends(str(now.bends), replicas))
    if now.draws and not (before.draws or now.stays or found.gathers):
        rank_zero_warn(_of_draws(str(now.draws), replicas))
    if values and not now.stays:
        rank_zero_warn(_of_written(values, replicas))
    new = [key for key, ways in now.logs.items() if not ways and before.logs.get(key, True)]
    if new and not ((cut and not (now.whole and now.fits)) or found.gathers):
        rank_zero_warn(
            f"what `self.log` is given as {with_lines(new, found)} for a batch is not made of what its parts give; "
            f"the mean over the {replicas} replicas is logged. Log a torchmetrics object."
        )


def _of_norm(name: str, norm: nn.Module, replicas: int) -> str:
    return (
        f"`{name}` ({type(norm).__name__}) computes over the samples of each of the {replicas} "
        "replicas, where one process computes over all of them; `Trainer(sync_batchnorm=True)` does as well."
    )


def _of_nothing_known(failed: str, replicas: int) -> str:
    why = f"does not run there ({failed})" if failed else "gives no loss there that tells"
    return (
        f"`training_step` was tried on parts of a batch and {why}, so nothing is known of its loss; the gradients "
        f"of the {replicas} replicas are averaged, as under DDP."
    )


def _of_mixed_samples(whole: float, mean: float, replicas: int) -> str:
    return (
        f"the loss of `training_step` is {whole:.6g} for two parts of a batch at once, and {mean:.6g} as the mean "
        f"of theirs: it depends on which samples it sees together. Each of the {replicas} replicas computes it "
        "over its own, and the mean of them is trained, as under DDP, where one process computes it over all. "
        "Gather what it is made of by `self.all_gather(x, sync_grads=True)`, or pass `whole_batch_loss=False` if "
        "each replica's own is meant."
    )


def _of_way(way: str | None, replicas: int) -> str:
    what = "a sum" if way == "sum" else f"a mean over {way}"
    how = "added up" if way == "sum" else "weighted by their number of these"
    return f"the loss of `training_step` is {what}: those of the {replicas} replicas are {how}."


def _of_bends(bends: str, replicas: int) -> str:
    return (
        f"{bends}. Each of the {replicas} replicas has that number of its own samples, and the mean of their "
        "losses is trained, as under DDP, where one process has it of all. Gather what it is made of by "
        "`self.all_gather(x, sync_grads=True)`, or pass "
        "`whole_batch_loss=False` if each replica's own is meant."
    )


def _of_draws(draws: str, replicas: int) -> str:
    return (
        f"`training_step` draws {draws}. Each of the {replicas} replicas draws for its own samples, where one "
        "process draws for all of them. `random_streams='layout'` gives every sample its own numbers, if the step "
        "draws from torch's generators; or pass `whole_batch_loss=False` if each replica's own is meant."
    )


def _of_written(values: Iterable[Name], replicas: int) -> str:
    return (
        f"`training_step` writes {_listed(values)} from the samples of each of the {replicas} replicas, where one "
        "process writes it from all of them. Write a mean over the replicas (`self.all_gather(x).mean(0)`), use a "
        "torchmetrics object, or pass `whole_batch_loss=False` if each replica's own is meant."
    )


def _listed(names: Iterable[Name]) -> str:
    """The first names of some values, and how many others there are."""
    words = [f"`{spelled(name)}`" for name in names]
    return ", ".join(words[:_NAMED]) + (f" and {len(words) - _NAMED} others" if len(words) > _NAMED else "")
