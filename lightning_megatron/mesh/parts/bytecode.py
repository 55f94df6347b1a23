"""Bytecode, read once: the start of each run asks for names and instructions of the same functions, again and again.

Answers are kept by code object, and a function whose code is replaced has another one. Codes are equal if all but their
files are, so no answer names a file::

    names_in(code)         ("net", "log", "cross_entropy")      global names and attributes, inner functions included
    operations_in(code)    {"LOAD_FAST", "LOAD_ATTR", ...}      names of the instructions, without taking them apart
    stored_by(code, "STORE_ATTR")    ("loss", "seen")           names that an instruction stores under, likewise
    instructions_of(code)  (Instruction(opname="RESUME", ...), ...)
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType

_FEW = 512
"""Functions whose instructions are kept; each takes a few ten kilobytes."""
_MANY = 8192


@functools.lru_cache(maxsize=_FEW)
def instructions_of(code: CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of a code, without those of functions in it."""
    return tuple(dis.get_instructions(code))


@functools.lru_cache(maxsize=_MANY)
def operations_in(code: CodeType) -> frozenset[str]:
    """Names of the instructions of a code, without those of functions in it."""
    return frozenset(dis.opname[each] for each in code.co_code[::2])  # two bytes each, and so are the caches between


@functools.lru_cache(maxsize=_MANY)
def stored_by(code: CodeType, operation: str) -> tuple[str, ...]:
    """Names under which instructions of one kind store, each once and in order, without those of functions in a code.

    Args:
        code: of a function.
        operation: ``"STORE_ATTR"`` or ``"STORE_GLOBAL"``, whose argument is the place of a name.
    """
    wanted, found, higher = dis.opmap[operation], list[str](), 0
    for instruction, lowest in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = higher | lowest
        higher = argument << 8 if instruction == dis.EXTENDED_ARG else 0
        if instruction == wanted:
            found.append(code.co_names[argument])
    return tuple(dict.fromkeys(found))


@functools.lru_cache(maxsize=_MANY)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Names that a code uses, functions inside of it included, each once and in order."""
    return tuple(dict.fromkeys(name for each in codes_in(code) for name in each.co_names))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code, and those of the functions in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from codes_in(value)
