"""Expressions in the code of a step: the attributes in them, and what else is one in other words.

The cases of a ``match`` statement are conditions on its subject, as far as they can be written down::

match self.global_step:          subject                    conditions
    case 0 | 1: ...              self.global_step           self.global_step == 0 or self.global_step == 1
    case n if n < 4: ...                                    self.global_step < 4
    case _: ...                                             none: it is what the others leave
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

Pure = Callable[[ast.expr], "ast.expr | None"]
TEXT = (ast.JoinedStr, ast.FormattedValue)


def condition_of(case: ast.match_case, subject: ast.expr, pure: Pure, names: dict[str, ast.expr]) -> ast.expr | None:
    """Whether a case is taken, were it the first; ``None`` if that cannot be written down.

    Args:
        case: of the statement.
        subject: what is matched, in terms of what is known.
        pure: an expression in the same terms.
        names: gets what the case's names stand for, of which its guard may be made.
    """
    matches = _matches(case.pattern, subject, pure, names)
    if matches is None or case.guard is None:
        return matches
    guard = pure(case.guard)
    return None if guard is None else ast.BoolOp(ast.And(), [matches, guard])


def known_parts(subject: ast.expr, pure: Pure) -> ast.Tuple | None:
    """A tuple of which some parts are known, with ``None`` for the others; ``None`` for any other subject."""
    if not isinstance(subject, ast.Tuple):
        return None
    return ast.Tuple([pure(part) for part in subject.elts], ast.Load())  # type: ignore[misc]


def _matches(pattern: ast.pattern, subject: ast.expr, pure: Pure, names: dict[str, ast.expr]) -> ast.expr | None:
    if isinstance(pattern, ast.MatchAs):
        if pattern.name is not None:
            names[pattern.name] = subject
        return ast.Constant(True) if pattern.pattern is None else _matches(pattern.pattern, subject, pure, names)
    if isinstance(pattern, ast.MatchValue):
        value = pure(pattern.value)
        return None if value is None else ast.Compare(subject, [ast.Eq()], [value])
    if isinstance(pattern, ast.MatchSingleton):
        return ast.Compare(subject, [ast.Is()], [ast.Constant(pattern.value)])
    found: list[ast.expr | None]
    joins: ast.boolop
    if isinstance(pattern, ast.MatchOr):
        found, joins = [_matches(each, subject, pure, names) for each in pattern.patterns], ast.Or()
    elif isinstance(pattern, ast.MatchSequence) and isinstance(subject, ast.Tuple):
        if len(pattern.patterns) != len(subject.elts) or any(isinstance(p, ast.MatchStar) for p in pattern.patterns):
            return None
        pairs = zip(pattern.patterns, subject.elts, strict=True)
        found = [_matches(each, part, pure, names) for each, part in pairs if part is not None]
        if not found:
            return None
        joins = ast.And()
    else:
        return None
    conditions = [each for each in found if each is not None]
    if len(conditions) < len(found):
        return None
    return ast.BoolOp(joins, conditions) if len(conditions) > 1 else conditions[0]


def as_attribute(call: ast.Call) -> ast.Attribute | None:
    """``getattr(x, "name")`` as the attribute that it reads."""
    if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1 and not call.keywords:
        whose, name = call.args[:2]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return ast.Attribute(whose, name.value, ast.Load())
    return None


def is_text(expression: ast.expr) -> bool:
    """Whether an expression makes a text, such as the name of a logged value, which chooses nothing by itself."""
    if isinstance(expression, ast.BinOp):
        return is_text(expression.left) or (isinstance(expression.op, ast.Mod) and is_word(expression.left))
    return isinstance(expression, TEXT)


def is_word(expression: ast.expr) -> bool:
    """Whether an expression is a string, written out."""
    return isinstance(expression, ast.Constant) and isinstance(expression.value, str)


def chains_of(expression: ast.expr) -> Iterator[tuple[str, ...]]:
    """The attributes of the module in an expression: ``("trainer", "max_epochs")``."""
    inner = set[ast.AST]()
    for part in ast.walk(expression):  # outer ones first
        if isinstance(part, (ast.Attribute, ast.Subscript)) and part not in inner:
            names, node = list[str](), part
            while isinstance(node, (ast.Attribute, ast.Subscript)):
                inner.add(node)
                names.append(node.attr if isinstance(node, ast.Attribute) else "")
                node = node.value  # type: ignore[assignment]
            yield tuple(reversed(names))


def stores(node: ast.AST) -> bool:
    """Whether a name, an attribute or an entry is set or deleted, rather than read."""
    return isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
