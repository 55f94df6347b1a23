"""Data loading that resumes at the next sample, wherever a run has stopped.

``from lightning_megatron import data`` is the public door: rows of Hugging Face's ``datasets``, tokenised, mixed,
packed and dealt out to replicas in one order for every layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_megatron.mesh.lazy import names_of

if TYPE_CHECKING:
    from lightning_megatron.strategy.data.dealing import deal as deal
    from lightning_megatron.strategy.data.folders import build_once as build_once
    from lightning_megatron.strategy.data.folders import cache_key as cache_key
    from lightning_megatron.strategy.data.packing import CollatePacked as CollatePacked
    from lightning_megatron.strategy.data.packing import pack as pack
    from lightning_megatron.strategy.data.rows import mix as mix
    from lightning_megatron.strategy.data.rows import tokenise as tokenise
else:
    __getattr__ = names_of(
        __name__,
        {
            "CollatePacked": "packing",
            "build_once": "folders",
            "cache_key": "folders",
            "deal": "dealing",
            "mix": "rows",
            "pack": "packing",
            "tokenise": "rows",
        },
    )

__all__ = ["CollatePacked", "build_once", "cache_key", "deal", "mix", "pack", "tokenise"]
