"""Modules that know nothing of tensor parallelism: tiny Hugging Face models, nanoGPT's shape, torch's encoders."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 300
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **SPECIAL,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **SPECIAL}
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **SPECIAL}
FALCON = {**WIDE, "ffn_hidden_size": 64, "alibi": False, "multi_query": False, "new_decoder_architecture": False}
NEOX = {**WIDE, "intermediate_size": 48, "max_position_embeddings": 64}

# These compute norms in float32, whatever their weights are, of numbers that ranks may add up in another order: a last
# bit that differs becomes 1e-8.
FLOAT32_NORMS = ("qwen", "gemma", "olmoe", "t5", "cohere", "granite", "glm", "smollm3", "mixtral", "nemotron")
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama, one key/value head, tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA, "head_dim": 8, "sliding_window": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**LLAMA, "head_dim": 8, "sliding_window": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", LLAMA),
    "phi": ("PhiForCausalLM", "PhiConfig", {**LLAMA, "num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", LLAMA),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", LLAMA),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**WIDE, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, **SPECIAL}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON),
    "falcon, one key/value head": ("FalconForCausalLM", "FalconConfig", {**FALCON, "multi_query": True}),
    "falcon, grouped": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon, alibi": ("FalconForCausalLM", "FalconConfig", {**FALCON, "alibi": True}),
    "bert": ("BertForMaskedLM", "BertConfig", NEOX),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "decoder_start_token_id": 0,
            **SPECIAL,
        },
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64, "vocab_size": VOCABULARY},
    ),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**GPT, "rotary_dim": 4, "n_ctx": 64}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT),
}

_FEW = {**WIDE, "intermediate_size": 48, "max_position_embeddings": 64}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
# More of them, tried less often.
FURTHER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, "tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**LLAMA, "head_dim": 8}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {**LLAMA, "use_qkv_bias": True}),
    "stablelm, head norms": ("StableLmForCausalLM", "StableLmConfig", {**LLAMA, "qk_layernorm": True}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", LLAMA),
    "cohere": ("CohereForCausalLM", "CohereConfig", LLAMA),
    "cohere, head norms": ("CohereForCausalLM", "CohereConfig", {**LLAMA, "use_qk_norm": True}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {**LLAMA, "sliding_window": 8}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", LLAMA),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", LLAMA),
    "glm": ("GlmForCausalLM", "GlmConfig", {**LLAMA, "head_dim": 8}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**LLAMA, "head_dim": 8}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", LLAMA),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", LLAMA),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig", _FEW),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4, "max_position_embeddings": 64},
            **{"attention_types": [[["global", "local"], 1]], **SPECIAL},
        },
    ),
    "biogpt": ("BioGptForCausalLM", "BioGptConfig", {**_FEW, "layerdrop": 0.0}),
    "xglm": (
        "XGLMForCausalLM",
        "XGLMConfig",
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, **SPECIAL},
    ),
    "ctrl": ("CTRLLMHeadModel", "CTRLConfig", {"n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4, **SPECIAL}),
    "opt, projected": (
        "OPTForCausalLM",
        "OPTConfig",
        {**WIDE, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 16},
    ),
    "gpt_neox, one residual": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**NEOX, "use_parallel_residual": False}),
    "gpt_neox_japanese": (
        "GPTNeoXJapaneseForCausalLM",
        "GPTNeoXJapaneseConfig",
        {**WIDE, "intermediate_multiple_size": 2, "max_position_embeddings": 64},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 3, **_EXPERTS}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**LLAMA, "num_experts": 3, **_EXPERTS}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**LLAMA, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 3, **_EXPERTS},
    ),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {**LLAMA, "num_local_experts": 3, **_EXPERTS}),
    "megatron_bert": ("MegatronBertForCausalLM", "MegatronBertConfig", {**_FEW, "is_decoder": True}),
    "roformer": ("RoFormerForCausalLM", "RoFormerConfig", {**_FEW, "is_decoder": True}),
    "openai_gpt": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT),
    "roberta": ("RobertaForCausalLM", "RobertaConfig", {**_FEW, "is_decoder": True}),
    "electra": ("ElectraForCausalLM", "ElectraConfig", {**_FEW, "embedding_size": 16, "is_decoder": True}),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64, **SPECIAL},
    ),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_FEW, "embedding_size": 16}),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **{"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 2},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64, **SPECIAL},
        },
    ),
}


def hugging_face(name: str, dropout: float = 0.0, **changes: Any) -> nn.Module:
    """A tiny model in float64, its weights large enough that a wrong head shows."""
    import transformers

    model, config, options = {**ARCHITECTURES, **FURTHER}[name]
    settings = getattr(transformers, config)(**{**options, **changes})
    for key, value in vars(settings).items():
        if "drop" in key and isinstance(value, float):
            setattr(settings, key, dropout)
    torch.manual_seed(0)
    built = getattr(transformers, model)(settings).double()
    return enlarged(built)


def enlarged(module: nn.Module) -> nn.Module:
    """The module with larger matrices and vectors that are neither zero nor one."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


class CausalSelfAttention(nn.Module):
    """Attention as small GPT scripts write it: one fused projection, sizes taken from the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head = heads
        self.n_embd = width

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class HeadwiseAttention(CausalSelfAttention):
    """The same with its head size kept as an attribute, so that local heads need only local attributes."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        size = self.c_attn.in_features // self.total_heads
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(batch, length, self.n_head, size).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(
            torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf
        )
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    @property
    def total_heads(self) -> int:
        return 4


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: type[CausalSelfAttention]) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT's shape: a ModuleDict of embeddings, blocks and norm, and a tied head."""

    def __init__(self, attention: type[CausalSelfAttention] = CausalSelfAttention, layers: int = 2) -> None:
        super().__init__()
        width, heads = 32, 4
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(64, width),
                "h": nn.ModuleList([Block(width, heads, attention) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Encoder(nn.Module):
    """A stack of torch's encoder layers with an embedding and an untied head."""

    def __init__(self, batch_first: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(
                    32, 4, 48, dropout=0.0, batch_first=batch_first, norm_first=norm_first, activation="gelu"
                )
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.batch_first else x.transpose(0, 1))


def tokens(batch: int = 2, length: int = 12, seed: int = 3) -> Tensor:
    """The same random token ids on every rank: [batch, length]."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
