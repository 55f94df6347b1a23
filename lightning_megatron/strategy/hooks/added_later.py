"""Modules and hooks that come into a module which has been divided already, or in the middle of training.

One process may build a part anew in any hook before the training. Here the layers have then been cut over stages and
their matrices over tensor ranks, and the new part would be in the way of both: its layers are on no stage's list, and a
stage cannot load it from weights of which it has its own. So what takes the place of layers is refused where it is
registered, and so is what compiles them; what takes the place of one matrix of several that were split together may
fit, and an error of a step says that it was put there.

Hooks of torch may come at any time, in a hook of Lightning. What stages tell each other of layers, and what is known of
a loss, was found out in a step of the hooks that were there; those that come later may keep numbers, or change outputs,
that nobody has asked for::

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 100:
            self.layers[0].register_forward_hook(lambda m, x, y: self.seen.append(y.norm()))

So the step that runs them first is followed, and tried, like a first one. Torch numbers all hooks of a process: where
it has given out no number since, nothing is gone over. Hooks of code that was met on a module before are nothing new.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Collection, Generator, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import ModelHooks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from lightning_megatron.mesh.parts.names import lies_in, parent
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from
from lightning_megatron.mesh.parts.syntax import definition_of
from lightning_megatron.mesh.pickling import users_hook
from lightning_megatron.pipeline.elsewhere.containers import GLOBAL_HOOKS, HOOKS, function_of
from lightning_megatron.pipeline.elsewhere.listing import is_in_part
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.strategy.hooks.whole_hooks import OF_ONE_RANK, may_run_on_one_rank
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks, functions_of, may_call
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of

_REGISTER = (
    *("register_forward_hook", "register_forward_pre_hook"),
    *("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"),
    *("register_module_forward_hook", "register_module_forward_pre_hook", "register_module_full_backward_hook"),
)
_EARLIER = "Build it in `__init__`, `setup` or `configure_model`"


class LateModules:
    """Looks at every module that is registered in a divided one, until :meth:`close`.

    Args:
        module: the user's module, divided.
        presence: what of it is where.
        wanted: whether it is divided at all.
    """

    def __init__(self, module: nn.Module, presence: Presence, *, wanted: bool) -> None:
        self._stages = presence.stages
        self._cut = presence.layer_names()
        self._split = {parent(name) for name, entry in presence.entries.items() if entry.is_slice}
        self._near_split = {parent(part) for part in self._split}
        self._names = {child: name for name, child in module.named_modules()} if wanted else {}
        kinds = {type(child) for child, name in self._names.items() if name in self._split}
        self._kinds = tuple(kind for kind in kinds if comes_from(kind, PACKAGE))
        self._compiled = {child for child in self._names if child._compiled_call_impl is not None}
        self._replaced: list[str] = []
        self._in_step = False
        look: Callable[..., None] | None = self._look if wanted else None
        self._handle = look and register_module_module_registration_hook(look)  # type: ignore[no-untyped-call]

    def _look(self, owner: nn.Module, key: str, child: nn.Module | None) -> None:
        above = self._names.get(owner)
        before = owner._modules.get(key)
        if above is None or child is None or child is before:
            return
        name = f"{above}.{key}" if above else key
        cut = any(lies_in(layer, name) for layer in self._cut)
        if isinstance(child, OptimizedModule) and (cut or any(lies_in(part, name) for part in self._split)):
            raise RuntimeError(_compiled(name))
        if any(is_in_part(part) or type(part) in self._kinds for part in child.modules() if part not in self._names):
            option = "pipeline_parallel_size" if self._stages > 1 else "tensor_parallel_size"
            raise RuntimeError(
                f"`{name}` is a copy, made in a hook, of modules that have been divided over ranks: it has what this "
                f"rank holds of them, and no checkpoint would have the rest. {_EARLIER}, or use `{option}=1`."
            )
        if cut:
            raise RuntimeError(
                f"`{name}` is given another module in a hook, after the division of the layers over {self._stages} "
                "pipeline stages, of which each has its own only: no stage would have all weights of the new one. "
                f"{_EARLIER}, or use `pipeline_parallel_size=1`."
            )
        if name in self._split:
            self._replaced.append(f"`{name}` was given another module in a hook, after the division of its weight")
        elif self._near_split.intersection((above, parent(above))):
            self._replaced.append(f"`{name}` was added in a hook, after the division of the weights beside it")
        other = self._names.get(child, name)
        if before is not None and other != name and not self._in_step:
            self._refuse_other(name, other)

    def _refuse_other(self, name: str, other: str) -> None:
        """Refuse that a part takes the place of another, as where an adapter is merged for good."""
        merge = (
            " Merge adapters for good by `lightning-megatron checkpoint export --merge-adapters`, and for a time by "
            "`merge_adapter()`."
            if lies_in(other, name)
            else ""
        )
        if self._stages > 1:
            raise RuntimeError(
                f"`{name}` is given `{other}` in a hook, but the stages of a pipeline know by name which "
                "of them has what. Choose between them in the step (`head = self.second if self.late else self.first`),"
                f" copy the numbers (`load_state_dict`), or use `pipeline_parallel_size=1`.{merge}"
            )
        if any(lies_in(part, other) for part in self._split):
            raise RuntimeError(
                f"`{name}` is given `{other}` in a hook, after the division of its weights over ranks, which know "
                "by name what they have parts of: a checkpoint would have one rank's part for the whole. Choose "
                f"between them in the step, or use `tensor_parallel_size=1`.{merge}"
            )

    @contextmanager
    def explaining(self) -> Generator[None, None, None]:
        """Around a step: its errors say which split modules were replaced before, and what was compiled."""
        self._in_step = True
        try:
            yield
        except Exception as error:
            late = [
                name
                for child, name in self._names.items()
                if child._compiled_call_impl is not None and child not in self._compiled
            ]
            if late:
                error.add_note(_compiled(late[0]))
            if self._replaced:
                error.add_note(
                    f"{self._replaced[0]} over tensor-parallel ranks: the modules around it keep their parts. "
                    f"{_EARLIER}, or use `tensor_parallel_size=1`."
                )
            raise
        finally:
            self._in_step = False

    def close(self) -> None:
        """Look no longer."""
        if self._handle is not None:
            self._handle.remove()


def _compiled(name: str) -> str:
    return (
        f"`{name}` is compiled in a hook, after its division over ranks, which is done in Python around its layers. "
        "Compile it in `__init__`, `setup` or `configure_model`: its layers are then compiled one by one, as they are "
        "divided."
    )


class RegisteredHooks:
    """Looks for hooks that have come since it looked last.

    Args:
        module: the user's, on whose parts they may be registered.

    Attributes:
        others: whether any have, as of the latest :meth:`look`: the same function anew, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._numbers, self._keys, self._kinds = -1, set[Hashable](), set[Hashable]()
        self.others = False
        self.look()

    def look(self) -> bool:
        """Whether hooks have come whose code was not met on their modules before."""
        self.others = False
        if RemovableHandle.next_id == self._numbers:
            return False
        self._numbers = RemovableHandle.next_id
        found = dict(self._registered())
        self.others, self._keys = not self._keys.issuperset(found), set(found)
        new = not self._kinds.issuperset(found.values())
        self._kinds.update(found.values())
        return new

    def _registered(self) -> Iterator[tuple[Hashable, Hashable]]:
        """Place and number under which a hook is registered, and place and code that it comes from."""
        tables = [(0, str(at), hooks) for at, hooks in enumerate(GLOBAL_HOOKS)]
        for part in self._parts:  # few have any, and a step may look at all
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                tables += [(id(part), name, getattr(part, name)) for name in HOOKS]
        for place, name, hooks in tables:
            for key, hook in hooks.items():
                if (given := users_hook(hook)) is not None:
                    yield (place, name, key), (place, name, _code(given))


def _code(hook: Any) -> Any:
    """Key of a function: equal where it is made anew, as a closure is for each step."""
    hook = getattr(hook, "func", hook)
    function = function_of(getattr(hook, "__func__", hook))
    return function.__code__ if isinstance(function, types.FunctionType) else type(hook)


class AddedHooks:
    """Says whether the code that a step runs has got hooks of the user's that it had not before.

    Args:
        module: the user's.

    Attributes:
        came: whether hooks of new code have come, as of the latest :meth:`look`.
        others: whether any have come, of code that was there before, too. What may be on some ranks only, as hooks that
            watch for the first rank, is none of the step's.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module, self._registered, self._alone = module, RegisteredHooks(module), cast("bool | None", None)
        self.came = self.others = False

    def look(self) -> None:
        """Look for hooks that have come since the last look."""
        new = self._registered.look()
        self.others = self._registered.others
        if self.others:
            self._alone = self._may_be_alone() if self._alone is None else self._alone  # hooks may come in every step
            self.others = not self._alone
        self.came = new and self.others

    def _may_be_alone(self) -> bool:
        """Whether hooks of Lightning that register hooks of torch may do so on some ranks only."""
        callbacks = foreign_callbacks(callbacks_of(self._module.trainer))
        for owner, above in ((self._module, pl.LightningModule), *((callback, Callback) for callback in callbacks)):
            for hook, method in vars(ModelHooks if above is pl.LightningModule else above).items():
                own = inspect.isfunction(method) and is_overridden(hook, owner, parent=above)
                some = own and may_call(owner, hook, _REGISTER) and may_run_on_one_rank(owner, hook)
                if some and _registers_on_one_rank(owner, hook):
                    return True
        return False


def _registers_on_one_rank(owner: Any, hook: str) -> bool:
    """Whether a hook asks for its rank around what registers hooks, and not to print a line beside it."""
    functions = {function.__name__: definition_of(function) for function in functions_of(owner, hook)}
    registers = set(_REGISTER)
    for _ in functions:  # what calls one that registers does so, too
        registers |= {name for name, code in functions.items() if code is None or _mentions(code, registers)}
    for definition in functions.values():
        if definition is None or definition.decorator_list:
            return True  # it cannot be read, or may be left out on other ranks
        for node in ast.walk(definition):
            if isinstance(node, (ast.If, ast.IfExp, ast.BoolOp, ast.While)) and _mentions(node, OF_ONE_RANK):
                leaves = any(isinstance(part, (ast.Return, ast.Continue, ast.Break)) for part in ast.walk(node))
                if leaves or _mentions(node, registers):
                    return True
    return False


def _mentions(node: ast.AST, names: Collection[str]) -> bool:
    parts = (getattr(part, "attr", getattr(part, "id", None)) for part in ast.walk(node))
    return any(part in names for part in parts)
