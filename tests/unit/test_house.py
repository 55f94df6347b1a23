"""The structure of the package, held by ceilings: rooms, directions, sizes. Reads the code as text and runs none of it.

A ceiling is lowered when the code gets below it and is never raised: a change that would need that belongs elsewhere.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tools.house import FLOORS, PAGE, page_with_table

PACKAGE = "lightning_megatron"
ROOT = Path(__file__).parents[2] / PACKAGE

PLANNER_SEES = ("mesh.layout", "mesh.lazy", "mesh.parts.names", "pipeline.schedules")
"""What the planner may import: it runs without torch."""

ROOMS_AT_THE_TOP = 15
FILES_IN_A_FOLDER = 15
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
CIRCLES = 0
CIRCLES_OF_FOLDERS = 1
CLASSES_IN_THE_CHAIN = 1
CLASSES_IN_ANY_CHAIN = 4
FLOORS_BETWEEN_ROOMS = 7
WALKS_OVER_FORWARDS = 0
ASSERTS_OF_PRESENCE = 7
MOCKS = 0
NAMES_OF_SEVERAL_FILES = 0
NAMES_OF_SEVERAL_CLASSES = 0
LIGHTNING_ELSEWHERE = 0
LIGHTNING_PRIVATES_ELSEWHERE = 0
ARROWS_UP = 0
PUBLIC_NAMES_WITHOUT_DOCSTRING = 0
DOCSTRINGS_THAT_BEGIN_WITH_WHAT = 0
PRIVATE_ATTRIBUTES_OF_OTHER_FILES = 7


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


@functools.cache
def nodes(name: str) -> tuple[ast.AST, ...]:
    """All nodes of a module's tree, which most rules go through."""
    return tuple(ast.walk(tree(name)))


@functools.cache
def nodes_of_tests() -> dict[str, tuple[ast.AST, ...]]:
    """The same of the tests' files, by name to import."""
    paths = sorted((ROOT.parent / "tests").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in paths]
    read = (tuple(ast.walk(ast.parse(path.read_text()))) for path in paths)
    return {name.removesuffix(".__init__"): found for name, found in zip(names, read, strict=True)}


def room(name: str) -> str:
    return name.split(".")[0]


@functools.cache
def arrows() -> dict[str, frozenset[str]]:
    """By module, the package's modules that it imports anywhere: at the top, lazily, or for type checkers."""
    return {name: frozenset(_imports(name)) for name in modules()}


def _imports(name: str) -> set[str]:
    found = set()
    for node in nodes(name):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            base = (node.module or "").removeprefix(PACKAGE).lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                found.add(full if full in modules() else base or "__init__")
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix(PACKAGE + ".") for alias in node.names if alias.name.startswith(PACKAGE + ".")
            }
    return found - {name}


def circles(graph: dict[str, frozenset[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components of more than one)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in graph:
        if node not in order:
            visit(node)
    return found


def functions(name: str) -> list[tuple[int, str]]:
    """Lines of every function: docstring and argument list aside."""
    found = []
    for node in nodes(name):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            found.append(((node.end_lineno or 0) - first.lineno + 1, f"{name}:{node.name}"))
    return found


def imports_lightning(name: str) -> list[ast.ImportFrom | ast.Import]:
    found: list[ast.ImportFrom | ast.Import] = []
    for node in nodes(name):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning":
            found.append(node)
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "lightning" for alias in node.names):
            found.append(node)
    return found


def test_the_top_of_the_package_shows_few_names() -> None:
    shown = [path.name for path in ROOT.iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len(shown) <= ROOMS_AT_THE_TOP, sorted(shown)
    assert sorted(name for name in shown if name.endswith(".py")) == ["__init__.py", "__main__.py"]


def test_every_room_has_a_floor() -> None:
    assert {room(name) for name in modules()} == set(FLOORS)
    assert max(FLOORS.values()) <= FLOORS_BETWEEN_ROOMS


def test_no_way_down_is_longer_than_the_floors() -> None:
    below: dict[str, set[str]] = defaultdict(set)
    for name, others in arrows().items():
        below[room(name)] |= {room(other) for other in others} - {room(name)}

    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in below[name]), default=0)

    heights = {name: floor(name) for name in FLOORS}
    assert max(heights.values()) <= FLOORS_BETWEEN_ROOMS, heights


def test_imports_point_down() -> None:
    wrong = [
        f"{name} -> {other}"
        for name, others in arrows().items()
        for other in others
        if room(name) != room(other)
        and (
            not other.startswith(PLANNER_SEES)
            if room(name) == "planner"
            else FLOORS[room(name)] <= FLOORS[room(other)] and room(name) != "__init__"
        )
    ]
    assert len(wrong) <= ARROWS_UP, wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = circles(arrows())
    assert len(found) <= CIRCLES, found


def test_few_folders_of_a_room_import_each_other_in_a_circle() -> None:
    def folder(name: str) -> str:
        inside = modules()[name].relative_to(ROOT).parts
        return ".".join(inside[:2]) if len(inside) > 2 else name

    below: dict[str, set[str]] = defaultdict(set)
    for name, others in arrows().items():
        below[folder(name)] |= {folder(other) for other in others} - {folder(name)}
    found = circles({name: frozenset(others) for name, others in below.items()})
    assert len(found) <= CIRCLES_OF_FOLDERS, found


def test_folders_hold_few_files() -> None:
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in modules().values())
    assert max(sizes.values()) <= FILES_IN_A_FOLDER, sizes.most_common(3)


def test_files_are_short() -> None:
    sizes = {name: path.read_text().count("\n") for name, path in modules().items()}
    assert max(sizes.values()) <= LINES_OF_A_FILE, sorted(sizes.items(), key=lambda item: item[1])[-3:]


def test_functions_are_short() -> None:
    lengths = sorted(length for name in modules() for length in functions(name))
    assert lengths[-1][0] <= LINES_OF_A_FUNCTION, lengths[-3:]


@functools.cache
def bases() -> dict[str, list[str]]:
    """By class of the package, the names of the classes that it is made of."""
    return {
        node.name: [ast.unparse(base) for base in node.bases]
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.ClassDef)
    }


def chain(name: str) -> int:
    return 1 + max((chain(base) for base in bases()[name] if base in bases() and base != name), default=0)


def test_the_strategy_is_a_short_chain_of_classes() -> None:
    assert chain("MegatronStrategy") <= CLASSES_IN_THE_CHAIN


def test_classes_stand_on_few_others() -> None:
    assert max(map(chain, bases())) <= CLASSES_IN_ANY_CHAIN, max(bases(), key=chain)


def test_attributes_are_put_past_classes_of_others_in_few_places() -> None:
    gluers = {
        name
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Subscript)
        and isinstance(target.value, ast.Attribute)
        and target.value.attr == "__dict__"
        and ast.unparse(target.value.value) != "self"
        and not isinstance(target.slice, ast.Name)
    }
    allowed = {"pipeline.forwards.entry", "data_parallel.buckets.flat_weights"}  # where torch, or pickle, looks for it
    assert gluers <= allowed, gluers - allowed


def test_public_names_have_docstrings() -> None:
    bare = [
        f"{name}:{node.lineno} {node.name}"
        for name in modules()
        for node in _public(tree(name), name)
        if not ast.get_docstring(node)
    ]
    assert len(bare) <= PUBLIC_NAMES_WITHOUT_DOCSTRING, bare


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """Not with "What is kept", "Where it lies", "Which of them": a reader looks for the name of the thing."""
    relative = [
        f"{name}: {text}"
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if (text := (ast.get_docstring(node) or "").split("\n")[0]).startswith(("What ", "Where ", "Which ", "Who "))
        and "?" not in text
    ]
    assert len(relative) <= DOCSTRINGS_THAT_BEGIN_WITH_WHAT, relative


def _public(node: ast.AST, name: str) -> list[ast.ClassDef | ast.FunctionDef]:
    """Public classes and functions; without the methods that torch and Lightning describe, and setters."""
    found: list[ast.ClassDef | ast.FunctionDef] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If):
            found += _public(child, name)
        if not isinstance(child, ast.ClassDef | ast.FunctionDef) or child.name.startswith("_"):
            continue
        bases = {ast.unparse(base) for base in child.bases} if isinstance(child, ast.ClassDef) else set()
        described = bases & {"Callback", "ClusterEnvironment"}
        if isinstance(child, ast.ClassDef):
            found += [child, *(() if described else _public(child, name))]
        elif child.name not in ("forward", "backward") and not any(
            ast.unparse(each).endswith(".setter") for each in child.decorator_list
        ):
            found.append(child)
    return found


def test_private_attributes_are_read_in_the_file_that_sets_them() -> None:
    """Of this package's own: those of torch and of Lightning are set nowhere in it, or by name in the list."""
    theirs = {"_parameters", "_buffers", "_modules", "_base", "_trainer", "_autograd", "_apply", "_device", "_mode"}
    theirs |= {"_world", "_timeout", "_replace", "_version", "_current_fx_name", "_forward_cache"}
    theirs |= {"_compiled_call_impl"}
    setters: dict[str, set[str]] = defaultdict(set)
    for name in modules():
        for node in nodes(name):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                setters[node.attr].add(name)
            elif isinstance(node, ast.FunctionDef):
                setters[node.name].add(name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                setters[node.target.id].add(name)
    readers = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr in setters
        and node.attr not in theirs
        and name not in setters[node.attr]
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]
    assert len(readers) <= PRIVATE_ATTRIBUTES_OF_OTHER_FILES, readers


def test_how_a_whole_tensor_is_cut_is_asked_by_its_public_names() -> None:
    private = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Attribute)
        and node.attr in ("_dim", "_split")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    assert not private, f"{private}: these are `along` and `spread` of `WholeTensor`"


def test_names_that_files_and_tests_import_from_each_other_exist() -> None:
    sources = {f"{PACKAGE}.{name}".removesuffix(".__init__"): nodes(name) for name in modules()} | nodes_of_tests()
    defined = {name: {each for node in found for each in _defined(node)} for name, found in sources.items()}
    folders = {name.rpartition(".")[0] for name in sources}
    missing = [
        f"{name}:{node.lineno} {node.module} {alias.name}"
        for name, found in sources.items()
        for node in found
        if isinstance(node, ast.ImportFrom) and (home := node.module) in sources
        for alias in node.names
        if alias.name not in defined[home] and f"{home}.{alias.name}" not in sources.keys() | folders
    ]
    assert not missing, missing


def test_private_names_are_imported_by_no_test_nor_from_one() -> None:
    private = [
        f"{name}:{node.lineno} {node.module} {alias.name}"
        for name, found in nodes_of_tests().items()
        for node in found
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (PACKAGE, "tests", "tools")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not private, private


def test_tests_patch_other_code_only_for_a_time() -> None:
    """By ``mock.patch`` or ``monkeypatch``: one process runs many tests."""
    restored = {"os", "sys", "rank_zero_only"}  # by the harness, between two jobs
    killed = ("tests.harness", "tests.checkpoints.kill_scenarios")  # the latter's processes serve no other test
    patches = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, found in nodes_of_tests().items()
        if not name.startswith(killed)
        for node in found
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node).split(".")[0] in _imported(name) - restored
    ]
    assert not patches, patches


@functools.cache
def _imported(test: str) -> set[str]:
    imports = (node for node in nodes_of_tests()[test] if isinstance(node, ast.ImportFrom | ast.Import))
    return {each for node in imports for each in _defined(node)}


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    return []


def test_a_class_name_means_one_thing() -> None:
    names = Counter(
        node.name
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    twice = sorted(name for name, times in names.items() if times > 1)
    assert len(twice) <= NAMES_OF_SEVERAL_CLASSES, twice


def test_lightning_is_imported_in_one_room() -> None:
    elsewhere = [
        name for name in modules() if room(name) != "strategy" and name != "models.task" and imports_lightning(name)
    ]
    assert len(elsewhere) <= LIGHTNING_ELSEWHERE, elsewhere


def test_privates_of_lightning_are_imported_in_one_folder() -> None:
    elsewhere = [
        f"{name}: {node.module} {alias.name}"
        for name in modules()
        if not name.startswith("strategy.lightning")
        for node in imports_lightning(name)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("_") or any(part.startswith("_") for part in (node.module or "").split("."))
    ]
    assert len({line.split(":")[0] for line in elsewhere}) <= LIGHTNING_PRIVATES_ELSEWHERE, elsewhere


def test_private_attributes_of_lightning_are_touched_in_one_folder() -> None:
    private = {  # those that the package uses at all: of Trainers, loops, loaders, connectors, modules and optimizers
        *("_trainer", "_current_fx_name", "_current_fx", "_results", "_logger_connector", "_accelerator_connector"),
        *("_signal_connector", "_callback_connector", "_combined_loader", "_data_fetcher", "_data_source", "_mode"),
        *("_state_dicts", "_restarting", "_restart_stage", "_should_check_val_fx", "_batches_that_stepped"),
        *("_broadcast_sigterm_tensor", "_device_mesh", "_optimizer"),
    }
    elsewhere = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name in modules()
        if not name.startswith("strategy.lightning")
        for node in nodes(name)
        if isinstance(node, ast.Attribute) and node.attr in private and ast.unparse(node.value) not in ("self", "cls")
    ]
    assert not elsewhere, elsewhere


def test_nothing_is_mocked_outside_of_tests() -> None:
    assert sum("unittest.mock" in path.read_text() for path in modules().values()) <= MOCKS


def test_wrapped_forwards_are_walked_in_one_place() -> None:
    walks = [
        name
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.While) and "hasattr" in ast.unparse(node.test) and "forward" in ast.unparse(node.test)
    ]
    assert len(walks) <= WALKS_OVER_FORWARDS, walks


def test_calls_of_modules_are_taken_over_in_one_place() -> None:
    takers = {
        name
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "'_call_impl'"
    }
    assert takers == {"pipeline.forwards.entry"}


def test_names_are_matched_with_parts_in_one_place() -> None:
    matchers = {
        name
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith"
        for prefix in node.args
        if isinstance(prefix, ast.JoinedStr) and ast.unparse(prefix).endswith("}.'")
    }
    assert matchers == {"mesh.parts.names"}
    cutters = {name for name in modules() if 'rpartition(".")' in modules()[name].read_text()}
    assert cutters == {"mesh.parts.names", "parallelize.report"}  # the second joins the two again


def test_values_are_pickled_for_other_ranks_in_one_place() -> None:
    picklers = {name for name in modules() if "pickle.dumps(" in modules()[name].read_text()}
    assert picklers <= {"mesh.messages.objects", "pipeline.elsewhere.luggage"}  # the second describes tensors apart


def test_where_parts_are_is_answered_by_the_presence() -> None:
    home = "pipeline.cut.partition"
    readers = {
        name for name, others in arrows().items() if home in others and "Partition" in modules()[name].read_text()
    }
    stages = {"pipeline.elsewhere.presence", "pipeline.stage.stage"}  # makes it; runs its layers
    assert readers - stages <= {"strategy.strategy", "strategy.assembly.assembler"}, readers  # shows it; makes the cut


def test_writes_of_user_code_are_put_back_in_one_place() -> None:
    rewinders = {name for name in modules() if "_unsafe_set_version_counter" in modules()[name].read_text()}
    assert rewinders == {"mesh.autograd", "pipeline.elsewhere.undo"}


def test_whose_code_something_is_is_asked_in_one_place() -> None:
    """By where it was defined; messages may say so, and made classes and functions claim to be defined elsewhere."""
    askers = [line for name in modules() if name != "mesh.parts.packages" for line in _asks_where_defined(name)]
    assert not askers, f"{askers}: ask `mesh/parts/packages.py`"


def _asks_where_defined(name: str) -> list[str]:
    passed_on = {each for node in nodes(name) if _passes_on_where_defined(node) for each in ast.walk(node)}
    return [
        f"{name}:{node.lineno}"
        for node in nodes(name)
        if (isinstance(node, ast.Attribute) and node.attr in ("__module__", "f_globals"))
        or (isinstance(node, ast.Constant) and node.value == "__module__")
        or (isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "'__name__'")
        if node not in passed_on
    ]


def _passes_on_where_defined(node: ast.AST) -> bool:
    if isinstance(node, ast.Dict):
        return any(isinstance(key, ast.Constant) and key.value == "__module__" for key in node.keys)
    assigned = isinstance(node, ast.Assign) and any("__module__" in ast.unparse(target) for target in node.targets)
    return assigned or isinstance(node, ast.FormattedValue)


def test_libraries_are_grouped_in_one_place() -> None:
    known = {"torch", "lightning", PACKAGE, "transformers", "torchmetrics", "peft", "numpy"}
    groups = {
        name
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Tuple | ast.Set | ast.List)
        if len(known & {each.value for each in node.elts if isinstance(each, ast.Constant)}) > 1
    }
    assert groups == {"mesh.parts.packages", "strategy.saving.resume"}  # the second writes down their versions


@pytest.mark.parametrize("name", ["__init__", "parallelize", "planner", "strategy"])
def test_type_checkers_see_the_names_of_a_lazy_package_and_no_others(name: str) -> None:
    hidden = [
        node for node in tree(name).body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    shown = {alias.name for node in hidden[0].body if isinstance(node, ast.ImportFrom) for alias in node.names}
    lazy = ast.literal_eval(next(n.args[1] for n in ast.walk(hidden[0].orelse[-1]) if isinstance(n, ast.Call)))
    listed = next(
        ast.literal_eval(node.value)
        for node in tree(name).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert "__getattr__" not in {
        ast.unparse(t) for n in tree(name).body if isinstance(n, ast.Assign) for t in n.targets
    }
    assert shown == set(lazy) == set(listed)


def test_the_documented_rooms_are_those_of_the_tree() -> None:
    page = PAGE.read_text()
    assert page == page_with_table(page), "run `python -m tools.house`"


def test_few_asserts_say_that_something_is_there() -> None:
    presence = [
        f"{name}:{node.lineno}"
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test)
    ]
    assert len(presence) <= ASSERTS_OF_PRESENCE, Counter(line.split(":")[0] for line in presence)


def test_one_file_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for name, path in modules().items():
        if path.name != "__init__.py":
            places[path.name].append(name)
    doubled = {file: names for file, names in places.items() if len(names) > 1}
    assert len(doubled) <= NAMES_OF_SEVERAL_FILES, doubled


@pytest.mark.parametrize("name", ["mesh.layout", "pipeline.schedule", "planner"])
def test_pure_python_rooms_do_not_import_torch(name: str) -> None:
    seen, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in seen or current not in modules():
            continue
        seen.add(current)
        waiting += [other.removeprefix(PACKAGE + ".") for other in _eager(current) if other.startswith(PACKAGE + ".")]
        roots = {other.split(".")[0] for other in _eager(current)}
        assert not roots & {"torch", "lightning"}, current


def _eager(name: str) -> list[str]:
    """Modules that are imported when this one is."""
    found = []
    for node in tree(name).body:
        if isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found
