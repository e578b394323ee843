"""Small random targets of many families, for the capture tests: name -> function that makes the model."""

from __future__ import annotations

from typing import Any

ROWS, HIDDEN, LAYERS = 320, 32, 6

BASE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
VISION_QWEN = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
VISION_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}

#: class prefix, fields over BASE
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral_sliding": ("Mistral", {"sliding_window": 5, "head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "final_logit_softcapping": 7.0},
    ),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, **EXPERTS}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_next": ("Qwen3Next", {"head_dim": 8, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 24}),
    "qwen3_5": ("Qwen3_5", {"head_dim": 8, **LINEAR}),
    "lfm2": ("Lfm2", {"full_attn_idxs": [2, 4], "block_multiple_of": 8}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "bamba": ("Bamba", {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [2, 4]}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "gpt2": ("GPT2", {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4}),
    "gemma3n": ("Gemma3n", {"head_dim": 8, "vocab_size_per_layer_input": ROWS, "num_kv_shared_layers": 0}),
}
WRAPPED = ("gemma3_vision", "qwen3_vl", "llava")


def family(name: str, seed: int = 0, **overrides: Any) -> Any:
    """The model of family `name`, eval mode, fp32."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (_wrapped(name) if name in WRAPPED else _text(name, overrides)).eval()
        for parameter in model.parameters():  # norms start as ones, and then any norm looks right
            if parameter.dim() == 1:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
        return model


def _text(name: str, overrides: dict[str, Any]) -> Any:
    import transformers

    prefix, fields = TEXT[name]
    maker = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    return getattr(transformers, f"{prefix}ForCausalLM" if prefix != "GPT2" else "GPT2LMHeadModel")(
        maker(**{**BASE, **fields, **overrides})
    )


def _wrapped(name: str) -> Any:
    import transformers as t

    if name == "gemma3_vision":
        text = {**BASE, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}
        config = t.Gemma3Config(
            text_config=text, vision_config=VISION_SIGLIP, mm_tokens_per_image=4, image_token_index=300,
            boi_token_index=301, eoi_token_index=302,
        )  # fmt: skip
        return t.Gemma3ForConditionalGeneration(config)
    if name == "qwen3_vl":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        text = {**BASE, "head_dim": 8, "rope_parameters": rope}
        return t.Qwen3VLForConditionalGeneration(
            t.Qwen3VLConfig(
                text_config=text,
                vision_config=VISION_QWEN,
                image_token_id=300,
                video_token_id=301,
                vision_start_token_id=302,
                vision_end_token_id=303,
            )
        )
    text = {**BASE, "model_type": "llama"}
    vision = {**VISION_SIGLIP, "model_type": "siglip_vision_model"}
    return t.LlavaForConditionalGeneration(
        t.LlavaConfig(text_config=text, vision_config=vision, image_token_index=300, image_seq_length=4)
    )
