"""Python reads this at start: the process lives on a machine that has none of the extras installed.

torchmetrics imports transformers, SciPy and matplotlib wherever it finds them, which is half of what a process spends
on its start, and the package has to work without them. A process that a test launches gets this folder on its path.
"""

import sys
from importlib import machinery, metadata

EXTRAS = {"datasets", "matplotlib", "pandas", "peft", "scipy", "sklearn", "tokenizers", "transformers"}
distribution_of = metadata.Distribution.from_name.__func__


class WithoutExtras:
    """Python's finder of modules on the path, which finds the extras nowhere."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name in EXTRAS else machinery.PathFinder.find_spec(name, path, target)

    find_distributions = machinery.PathFinder.find_distributions
    invalidate_caches = machinery.PathFinder.invalidate_caches


@classmethod
def from_name(cls, name):
    if name.lower() in EXTRAS:
        raise metadata.PackageNotFoundError(name)
    return distribution_of(cls, name)


sys.meta_path[sys.meta_path.index(machinery.PathFinder)] = WithoutExtras
metadata.Distribution.from_name = from_name
