"""Warnings are errors, in pytest's process and in the workers alike; the exceptions stand here with their reason."""

from __future__ import annotations

import warnings

# (action, message regex, category, reason). Messages are matched at the start, as the warnings module does.
FILTERS: tuple[tuple[str, str, type[Warning], str], ...] = (
    ("error", "", Warning, "a warning nobody reads is a bug nobody sees"),
    ("ignore", r".*does not have many workers", UserWarning, "Lightning's advice for large data sets"),
    ("ignore", r".*is smaller than the logging interval", UserWarning, "Lightning's advice for short runs"),
    ("ignore", r".*Checkpoint directory .* exists and is not empty", UserWarning, "Lightning, directories are reused"),
    ("ignore", r".*`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, "Lightning against torch >= 2.9"),
    ("ignore", r".*isinstance\(treespec, LeafSpec\)", DeprecationWarning, "Lightning against torch >= 2.9"),
    (
        "ignore",
        r".*Starting from v1\.9\.0, `tensorboardX` has been removed",
        UserWarning,
        "Lightning without tensorboard",
    ),
    ("ignore", r".*torch\.jit\.script.* is (deprecated|not supported)", DeprecationWarning, "torch's own imports"),
    (
        "ignore",
        r".*use of fork\(\) may lead to deadlocks",
        DeprecationWarning,
        "data loader workers of a threaded process",
    ),
    ("ignore", r".*The 'train_dataloader' does not have many workers", UserWarning, "as above, older wording"),
    ("ignore", r".*GPU available but not used", UserWarning, "the tests run on CPU processes"),
    ("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning, "torch.compile hides it itself"),
    ("ignore", r"`training_step` returned `None`", UserWarning, "Lightning asks whether it was meant; it was"),
    ("ignore", r".*The number of training batches", UserWarning, "Lightning's advice for short runs"),
)


def apply_filters() -> None:
    """Replaces this process's warning filters by the project's."""
    warnings.resetwarnings()
    for action, message, category, _ in FILTERS:
        warnings.filterwarnings(action, message, category)  # type: ignore[arg-type]


def filter_lines() -> list[str]:
    """The same list in the syntax of pytest's ``filterwarnings`` option."""
    return [f"{action}:{message}:{category.__name__}" for action, message, category, _ in FILTERS]
