"""Datasheet values of GPUs, nodes and the network between nodes.

``constants.py`` holds the shares of these values that a training step reaches. Clusters that are not in the table are
read from a YAML file with the same field names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

GB = 1e9
GIB = 2.0**30
MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """Datasheet of one accelerator.

    Args:
        name: its name in tables.
        generation: ``volta``, ``ampere``, ``hopper`` or ``blackwell``; efficiency constants are per generation.
        peak_16: dense 16-bit peak in FLOP/s.
        peak_8: dense 8-bit floating-point peak in FLOP/s; 0 if the GPU has no 8-bit products.
        memory: device memory in bytes, as the driver reports it.
        bandwidth: device memory bandwidth in bytes/s.
        processors: streaming multiprocessors, over which the tiles of a matrix product are distributed.

    Raises:
        ValueError: a number is not positive.
    """

    name: str
    generation: str
    peak_16: float
    peak_8: float
    memory: float
    bandwidth: float
    processors: int

    def __post_init__(self) -> None:
        for name in ("peak_16", "memory", "bandwidth", "processors"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}={getattr(self, name)}` of GPU {self.name} must be positive; correct it")

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s at ``precision``: half of the 16-bit one for TF32, a sixteenth for 64 bits.

        Raises:
            ValueError: ``precision`` is ``fp8``, and the GPU has no 8-bit products.
        """
        if precision != "fp8":
            return self.peak_16 / {"fp32": 2.0, "fp64": 16.0}.get(precision, 1.0)
        if not self.peak_8:
            raise ValueError(f"`precision=fp8` is not available on {self.name}; use bf16 or a Hopper GPU")
        return self.peak_8


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal GPUs joined by a network.

    Args:
        gpu: the accelerator in every node.
        gpus_per_node: accelerators joined by NVLink.
        nvlink: bytes/s that one GPU sends inside the node (one direction).
        network: bytes/s that one GPU sends to other nodes (one direction): total of the node's adapters per GPU.
        nvlink_latency: seconds per hop between two GPUs of a node.
        network_latency: seconds per hop between two nodes.
        host_memory: bytes of a node's main memory.
        host_bandwidth: bytes/s that one GPU exchanges with it in each direction.
        host_update: parameters/s that a node's processors update per GPU, with Adam on 32-bit weights and moments.
    """

    gpu: Gpu
    gpus_per_node: int = 8
    nvlink: float = 300 * GB
    network: float = 25 * GB
    nvlink_latency: float = 2e-6
    network_latency: float = 8e-6
    host_memory: float = 2e12
    host_bandwidth: float = 24 * GB
    host_update: float = 1.7e9

    def host_share(self, ranks: int) -> float:
        """Bytes of main memory for each of ``ranks``, which may be fewer than the GPUs of a node."""
        return self.host_memory / min(self.gpus_per_node, ranks)

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "nvlink", "network", "host_memory", "host_bandwidth", "host_update"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}={getattr(self, name)}` must be positive; correct the cluster description")

    @classmethod
    def named(cls, name: str) -> Cluster:
        """The usual cluster of a GPU.

        Args:
            name: of the GPU, in any common spelling.

        Raises:
            ValueError: no GPU of that name is in the table; the message lists those that are.
        """
        key = _canonical(name)
        if key not in CLUSTERS:
            known = ", ".join(sorted(CLUSTERS))
            raise ValueError(f"`gpu={name}` is not in the table ({known}); describe it in a YAML file with `--cluster`")
        return CLUSTERS[key]

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Read a cluster from YAML.

        ``gpu`` is a known name, or a mapping of :class:`Gpu` fields (peaks in TFLOP/s, memory in GiB, bandwidth in
        GB/s); ``nvlink``, ``network`` and ``host_bandwidth`` are in GB/s per GPU and direction, latencies in
        microseconds, ``host_memory`` in GiB per node, ``host_update`` in parameters/s per GPU. Fields that are left out
        keep the value of the known GPU's usual cluster.

        Raises:
            ValueError: the file is not YAML, a field is unknown or not a positive number, or a required one is missing.
        """
        import yaml  # type: ignore[import-untyped]

        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"`{path}` is not YAML: {error}") from error
        if not isinstance(values, Mapping):
            raise ValueError(f"`{path}` holds {type(values).__name__}, not a mapping of cluster fields")
        return cls.from_mapping(values)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Cluster:
        """Make a cluster from the mapping that :meth:`from_yaml` reads.

        Raises:
            ValueError: as for :meth:`from_yaml`.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown cluster fields {unknown}; known ones are {sorted(known)}")
        if "gpu" not in values:
            raise ValueError("the cluster description has no `gpu`; give a known name or a mapping of its datasheet")
        gpu = values["gpu"]
        if not isinstance(gpu, (str, Mapping)):
            raise ValueError(f"`gpu: {gpu}` must be a known name or a mapping of its datasheet")
        base = cls.named(gpu) if isinstance(gpu, str) else cls(gpu=_gpu_from_mapping(gpu))
        scale = {"nvlink": GB, "network": GB, "nvlink_latency": 1e-6, "network_latency": 1e-6, "gpus_per_node": 1}
        scale |= {"host_memory": GIB, "host_bandwidth": GB, "host_update": 1}
        return replace(base, **_scaled(values, scale))


def _scaled(values: Mapping[str, Any], units: Mapping[str, float]) -> dict[str, Any]:
    """Convert the numbers in ``values`` to base units: name -> number.

    Raises:
        ValueError: a value is not a finite number, or is negative.
    """
    for name in units:
        value = values.get(name, 1)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ValueError(f"`{name}: {value}` of the cluster description must be a positive number")
    return {name: values[name] * unit for name, unit in units.items() if name in values}


def _gpu_from_mapping(values: Mapping[str, Any]) -> Gpu:
    """Make a GPU from its YAML fields, which have the units of datasheets."""
    units = {"peak_16": 1e12, "peak_8": 1e12, "memory": GIB, "bandwidth": GB, "processors": 1}
    allowed = {"name", "generation", *units}
    if unknown := sorted(set(values) - allowed):
        raise ValueError(f"unknown GPU fields {unknown}; known ones are {sorted(allowed)}")
    if missing := sorted({"name", "peak_16", "memory", "bandwidth"} - set(values)):
        raise ValueError(f"the GPU description misses {missing}; add them from its datasheet")
    numbers = _scaled(values, units)
    defaults = {"peak_8": 0.0, "processors": 108}
    generation = str(values.get("generation", "ampere"))
    if generation not in GENERATIONS:
        raise ValueError(f"`generation={generation}` of the GPU is not one of {', '.join(GENERATIONS)}")
    return Gpu(name=str(values["name"]), generation=generation, **{**defaults, **numbers})


GENERATIONS = ("volta", "ampere", "hopper", "blackwell")

_V100 = Gpu("V100-32", "volta", 125e12, 0.0, 32510 * MIB, 900 * GB, 80)
_A100_40 = Gpu("A100-40", "ampere", 312e12, 0.0, 40536 * MIB, 1555 * GB, 108)
_A100_80 = Gpu("A100-80", "ampere", 312e12, 0.0, 81251 * MIB, 2039 * GB, 108)
_H100 = Gpu("H100", "hopper", 989e12, 1979e12, 81559 * MIB, 3350 * GB, 132)
_H200 = Gpu("H200", "hopper", 989e12, 1979e12, 143771 * MIB, 4800 * GB, 132)
_B200 = Gpu("B200", "blackwell", 2250e12, 4500e12, 183359 * MIB, 7700 * GB, 148)

CLUSTERS: dict[str, Cluster] = {
    "V100-32": Cluster(_V100, nvlink=150 * GB, network=6.25 * GB, host_memory=1.5e12, host_bandwidth=12 * GB),
    "A100-40": Cluster(_A100_40, nvlink=300 * GB, network=25 * GB),
    "A100-80": Cluster(_A100_80, nvlink=300 * GB, network=25 * GB),
    "H100": Cluster(_H100, nvlink=450 * GB, network=50 * GB, host_bandwidth=50 * GB),
    "H200": Cluster(_H200, nvlink=450 * GB, network=50 * GB, host_bandwidth=50 * GB),
    "B200": Cluster(_B200, nvlink=900 * GB, network=50 * GB, host_bandwidth=50 * GB),
}
"""Datasheet values of NVIDIA's DGX of each GPU (V100: SuperPOD of 2019; A100: 8 x 200 Gb/s; later: 8 x 400 Gb/s).

``host_bandwidth`` is what copies reach over PCI Express 3, 4 and 5 x16 (16, 32 and 64 GB/s). ``host_update`` is read
off the published log of Deep Optimizer States (arXiv 2410.21316): 6.74 G parameters in 3.98 s on the processor.
"""

_ALIASES = {"A100": "A100-80", "V100": "V100-32", "GH200": "H100", "H800": "H100", "A800": "A100-80", "B100": "B200"}


def _canonical(name: str) -> str:
    """Name in the table of a GPU in any common spelling: ``NVIDIA A100-SXM4-80GB``, ``a100_80``, ``H100 SXM`` ..."""
    text = re.sub(r"[\s_]+", "-", name.strip().upper())
    text = re.sub(r"NVIDIA-|TESLA-|-?(SXM\d?|NVL|PCIE|HBM\d?E?)", "", text)
    text = re.sub(r"(\d+)(GB|GIB|G)\b", r"\1", text)
    text = re.sub(r"^(H100|H200|B200)-\d+$", r"\1", text)
    return _ALIASES.get(text, text)


def cluster_for(name: str, peak_tflops: float | None = None) -> tuple[Cluster, str | None]:
    """The cluster of a GPU whose name may be unknown.

    An unknown GPU with a known 16-bit (or 8-bit) peak is replaced by the table's GPU with the nearest peak. If the peak
    is a 16-bit one, the table's peaks are scaled to it. Published runs on a "GPU of the Ampere generation" are read so.

    Args:
        name: of the GPU, in any common spelling.
        peak_tflops: its dense peak in TFLOP/s, if known.

    Returns:
        The cluster, and a remark if another GPU was taken, else ``None``.

    Raises:
        ValueError: the name is unknown and no peak was given.
    """
    try:
        return Cluster.named(name), None
    except ValueError:
        if peak_tflops is None:
            raise
    found = min(CLUSTERS.values(), key=lambda c: (_peak_distance(c.gpu, peak_tflops), -c.gpu.memory))
    known, stated = found.gpu, peak_tflops * 1e12
    if _ratio(known.peak_16, stated) <= _ratio(known.peak_8, stated):
        scale = stated / known.peak_16
        found = replace(found, gpu=replace(known, peak_16=stated, peak_8=known.peak_8 * scale))
    return found, f"GPU {name!r} is not in the table; taken as {known.name}, the nearest in peak"


def _peak_distance(gpu: Gpu, peak_tflops: float) -> float:
    """Ratio, at least 1, between ``peak_tflops`` and the nearer of a GPU's 16-bit and 8-bit peaks."""
    return min(_ratio(gpu.peak_16, peak_tflops * 1e12), _ratio(gpu.peak_8, peak_tflops * 1e12))


def _ratio(left: float, right: float) -> float:
    """The larger of two numbers divided by the smaller; infinite if one is 0."""
    return max(left, right) / min(left, right) if left and right else math.inf
