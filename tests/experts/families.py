"""Configurations of Hugging Face's mixtures, small."""

from __future__ import annotations

from typing import Any

WIDTH = 16

_GROUPED = {"num_key_value_heads": 1, "intermediate_size": 16}
_CHOOSES = {"num_experts": 4, "num_experts_per_tok": 2}
_CHOOSES_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_DEEPSEEK = {
    **_ROUTED,
    "intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_MAMBA = {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", {**_GROUPED, **_CHOOSES_LOCAL}),
    "Qwen2Moe": (
        "Qwen2MoeForCausalLM",
        {**_GROUPED, **_CHOOSES, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16},
    ),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", {**_GROUPED, **_CHOOSES, "moe_intermediate_size": 8, "head_dim": 8}),
    "Olmoe": ("OlmoeForCausalLM", {**_GROUPED, **_CHOOSES}),
    "GptOss": ("GptOssForCausalLM", {**_GROUPED, **_CHOOSES_LOCAL, "head_dim": 8}),
    "GraniteMoe": ("GraniteMoeForCausalLM", {**_GROUPED, **_CHOOSES_LOCAL}),
}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV2": ("DeepseekV2ForCausalLM", {**_DEEPSEEK, "topk_method": "greedy"}),
    "DeepseekV3": ("DeepseekV3ForCausalLM", {**_DEEPSEEK, "n_group": 2, "topk_group": 1}),
    "Jamba": (
        "JambaForCausalLM",
        {**_GROUPED, **_CHOOSES, **_MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "Phimoe": (
        "PhimoeForCausalLM",
        {**_GROUPED, **_CHOOSES_LOCAL, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    ),
    "Ernie4_5_Moe": (
        "Ernie4_5_MoeForCausalLM",
        {**_GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0},
    ),
    "Glm4Moe": ("Glm4MoeForCausalLM", {**_GROUPED, **_ROUTED, "first_k_dense_replace": 0, "head_dim": 8}),
    "Dots1": (
        "Dots1ForCausalLM",
        {**_GROUPED, **_ROUTED, "first_k_dense_replace": 0, "head_dim": 8, "n_shared_experts": 1},
    ),
    "FlexOlmo": ("FlexOlmoForCausalLM", {**_GROUPED, **_CHOOSES}),
    "Lfm2Moe": (
        "Lfm2MoeForCausalLM",
        {
            **_GROUPED,
            **_CHOOSES,
            "moe_intermediate_size": 8,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "MiniMax": ("MiniMaxForCausalLM", {**_GROUPED, **_CHOOSES_LOCAL, "head_dim": 8}),
    "GraniteMoeShared": (
        "GraniteMoeSharedForCausalLM",
        {**_GROUPED, **_CHOOSES_LOCAL, "shared_intermediate_size": 8},
    ),
    "NemotronH": (
        "NemotronHForCausalLM",
        {
            **_GROUPED,
            **_ROUTED,
            "layers_block_type": ["attention", "moe"],
            "head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "moe_shared_expert_intermediate_size": 8,
        },
    ),
    "Dbrx": (
        "DbrxForCausalLM",
        {
            "d_model": WIDTH,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 16,
            "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
        },
    ),
    "JetMoe": (
        "JetMoeForCausalLM",
        {**_CHOOSES_LOCAL, "num_key_value_heads": 2, "kv_channels": 8, "intermediate_size": 16},
    ),
    "SwitchTransformers": (
        "SwitchTransformersForConditionalGeneration",
        {
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 16,
            "num_heads": 2,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_experts": 4,
            "dropout_rate": 0.0,
            "router_jitter_noise": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "Llama4Text": ("Llama4ForCausalLM", {**_GROUPED, **_CHOOSES_LOCAL, "intermediate_size_mlp": 16, "head_dim": 8}),
    "HunYuanMoEV1": ("HunYuanMoEV1ForCausalLM", {**_GROUPED, "num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "AriaText": ("AriaTextForCausalLM", {**_GROUPED, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
}
"""Hugging Face's mixtures: by the start of their configuration's name, the model and the configuration.

The first are trained in more ways than the others."""
UNSPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "LongcatFlash": (
        "LongcatFlashForCausalLM",
        {
            **_DEEPSEEK,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 16,
            "expert_ffn_hidden_size": 8,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "head_dim": 4,
        },
    ),
}
"""Those whose experts stay on every replica."""
DEEP: dict[str, dict[str, Any]] = {
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"] * 2},
    "NemotronH": {"layers_block_type": ["attention", "moe"] * 2},
    "SwitchTransformers": {
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
    },
}
"""Of those that name each of their layers, or count them otherwise: the configuration of four."""
UNCUT = ("Dbrx", "JetMoe")
"""Those whose experts are distributed, and not cut themselves."""
IN_FLOAT32 = (
    "DeepseekV2",
    "DeepseekV3",
    "Ernie4_5_Moe",
    "Glm4Moe",
    "Dots1",
    "NemotronH",
    "Llama4Text",
    "LongcatFlash",
    "SwitchTransformers",
    "switching",
)
"""Those whose routers compute in 32 bits, whatever the others do."""
