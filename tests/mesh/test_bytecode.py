"""Names and instructions of bytecode are those that `dis` tells, and are read once."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator

import pytest

from lightning_megatron.mesh.parts import bytecode
from lightning_megatron.mesh.parts.bytecode import codes_in, instructions_of, names_in, operations_in, stored_by


def _codes() -> Iterator[types.CodeType]:
    for module in (bytecode, inspect, dis):
        functions = (each for each in vars(module).values() if isinstance(each, types.FunctionType))
        yield from (code for function in functions for code in codes_in(function.__code__))


def test_operations_are_the_names_of_all_instructions() -> None:
    for code in _codes():
        assert operations_in(code) == {step.opname for step in dis.get_instructions(code, show_caches=True)}


@pytest.mark.parametrize("operation", ["STORE_ATTR", "STORE_GLOBAL"])
def test_stored_names_are_those_of_the_instructions(operation: str) -> None:
    many = "def f(x):\n    global g\n    g = 1\n" + "".join(f"    x.a{each} = x.b{each}\n" for each in range(300))
    long = compile(many, "many.py", "exec").co_consts[0]  # places of names that take more than a byte
    for code in (*_codes(), long):
        steps = [step.argval for step in dis.get_instructions(code) if step.opname == operation]
        assert stored_by(code, operation) == tuple(dict.fromkeys(steps))


def test_names_are_those_of_inner_functions_as_well() -> None:
    def outer(value: list[int]) -> object:
        return value.copy(), lambda: value.append(len(value)), value.copy()

    assert names_in(outer.__code__) == ("copy", "append", "len")


def test_each_code_is_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def fresh(x):\n    return x.a + x.b\n"
    first, again = (compile(source, file, "exec").co_consts[0] for file in ("one.py", "other.py"))
    taken, real = list[types.CodeType](), dis.get_instructions
    monkeypatch.setattr(dis, "get_instructions", lambda code: (taken.append(code), real(code))[1])
    assert instructions_of(first) is instructions_of(again)
    assert taken == [first]
