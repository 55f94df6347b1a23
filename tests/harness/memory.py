"""The memory that a process holds in tensors, counted from the tensors themselves."""

from __future__ import annotations

import gc

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def live_storages() -> dict[int, torch.UntypedStorage]:
    """The storages of all live dense CPU tensors of this process, by address.

    Fake tensors have no memory, and torch's own caches may keep some of an earlier job in a reused process.
    """
    gc.collect()
    found = {}
    for each in gc.get_objects():
        kind = type(each)  # isinstance would wake lazy proxies
        if not issubclass(kind, Tensor) or issubclass(kind, FakeTensor):
            continue
        if each.device.type == "cpu" and not each.is_sparse:
            found[each.untyped_storage().data_ptr()] = each.untyped_storage()
    return found
