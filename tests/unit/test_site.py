"""The site is built without a warning from the pages and the code, and the launches it shows are well formed."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.distributed.launcher.api import LaunchConfig

from lightning_megatron import MegatronStrategy
from tools import site

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def test_every_argument_of_the_strategy_stands_in_one_table_with_its_default() -> None:
    page = site.arguments_page()
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+) \|$", page, re.M)
    assert sorted(name for name, *_ in rows) == sorted(site.signature())
    assert ("pipeline_schedule", "'1f1b'") in [row[:2] for row in rows]
    undescribed = {name for name, _, meaning in rows if meaning == "as Lightning has it"}
    assert undescribed <= {
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
    }


def test_every_command_stands_on_its_page() -> None:
    page = site.on_page_markdown("before <!-- commands --> after")
    for name in (
        "timeline",
        "plan",
        "predict",
        "explain",
        "rehearse",
        "generate",
        "checkpoint inspect",
        "checkpoint export",
    ):
        assert f"\n## {name}\n" in page
    assert "| `--gpus` | required | GPUs to use. |" in page and page.startswith("before ")


@pytest.mark.parametrize("name", ["slurm", "torchrun"])
def test_scripts_of_launches_are_ones(name: str) -> None:
    subprocess.run(["bash", "-n", str(LAUNCH / f"{name}.sh")], check=True)


@pytest.mark.parametrize("name", ["cli", "job", "pytorchjob"])
def test_manifests_are_read_and_start_what_they_say(name: str) -> None:
    documents = list(yaml.safe_load_all((LAUNCH / f"{name}.yaml").read_text(encoding="utf-8")))
    if name == "cli":
        chosen = documents[0]["trainer"]["strategy"]
        assert MegatronStrategy(**chosen["init_args"]).options.pipeline_parallel_size == 2
        return
    job = documents[-1]
    if name == "job":
        service, name_of_pods = documents[0], job["spec"]["template"]["spec"]["subdomain"]
        assert service["metadata"]["name"] == name_of_pods == job["metadata"]["name"]
        pods, command = [job["spec"]["template"]], job["spec"]["template"]["spec"]["containers"][0]["command"][-1]
        assert "--nnodes=2" in command and job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    else:
        pods = [kind["template"] for kind in job["spec"]["pytorchReplicaSpecs"].values()]
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
        given = {entry["name"]: entry["value"] for entry in container["env"]}
        assert set(given) == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", SHUTDOWN}
        assert int(given[SHUTDOWN]) < pod["spec"]["terminationGracePeriodSeconds"]


def test_variables_of_launches_are_those_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHUTDOWN, "290")
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == 290
    text = (LAUNCH / "torchrun.sh").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", SHUTDOWN):
        assert f"export {name}=" in text and f"`{name}`" in page
    with (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").open("rb") as library:
        assert mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ).find(b"GLOO_SOCKET_IFNAME") > 0


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_launch_scripts_are_scripts(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], check=False, timeout=60).returncode == 0


def test_the_first_code_of_the_readme_comes_at_once() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.index("```python") < 8


def test_python_in_the_guides_to_launching_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "launching.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "launching.md", "exec")


def test_the_drawn_tree_names_arguments_that_there_are() -> None:
    drawn = (ROOT / "docs" / "images" / "choosing_sizes.svg").read_text(encoding="utf-8")
    named = re.findall(r">(\w+)=", drawn)
    assert len(named) > 6 and set(named) <= set(site.signature())


def test_tables_of_the_reference_are_marked_for_narrow_screens() -> None:
    inside = SimpleNamespace(file=SimpleNamespace(src_uri="reference/layers.md"))
    assert site.on_page_content("<p>", page=inside) == '<div class="reference"><p></div>'
    assert ".reference table" in (ROOT / "docs" / "stylesheets" / "tables.css").read_text(encoding="utf-8")


def test_references_in_docstrings_are_shown_as_names() -> None:
    assert (
        site.on_page_content("by :class:<code>~a.b.C</code>, <code>~d</code>") == "by <code>C</code>, <code>~d</code>"
    )


@pytest.mark.wide
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 25
    assert "full_state_dict" in (tmp_path / "reference" / "strategy" / "index.html").read_text(encoding="utf-8")
    assert "tensor_parallel_size" in (tmp_path / "reference" / "arguments" / "index.html").read_text(encoding="utf-8")
    wrong = []
    for page in pages:
        for link in re.findall(r'(?:href|src)="([^"#:?]+)[^":]*"', page.read_text(encoding="utf-8")):
            if not link.startswith("/") and not (page.parent / link).exists():
                wrong.append(f"{page.relative_to(tmp_path)}: {link}")
    assert not wrong
