"""Sizes of a tiny model of every MoE family of transformers; `small_models` builds them.

The names are those of transformers' folders; a second model of a folder has a name after a dot.
"""

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 97
LAYERS = 4


@dataclass(frozen=True)
class Small:
    """The recipe of one family: classes of transformers by name, and fields that differ."""

    config: str
    model: str = "AutoModelForCausalLM"
    fields: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, "Small"] = field(default_factory=dict)  # configs inside the config


HEADS = {"num_key_value_heads": 4}  # families whose attention has no grouped keys
MIXED = {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)}


def rope(*sections: int) -> dict[str, Any]:
    """Rotary positions of time, height and width, in so many pairs of features each."""
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": list(sections),
        }
    }


FAMILIES: dict[str, Small] = {
    "afmoe": Small("AfmoeConfig"),
    "aria": Small("AriaTextConfig", "AriaTextForCausalLM"),
    "axk1": Small("AXK1Config", fields=HEADS),
    "axk2": Small("AXK2Config", fields=HEADS),
    "bailing_hybrid": Small("BailingHybridConfig", fields=HEADS | MIXED),
    "beam": Small("BeamConfig"),
    "cohere2_moe": Small("Cohere2MoeConfig"),
    "dbrx": Small(
        "DbrxConfig",
        fields={
            "d_model": 32,
            "n_heads": 4,
            "n_layers": LAYERS,
            "max_seq_len": 128,
            "ffn_config": {
                "ffn_hidden_size": 48,
                "moe_num_experts": 8,
                "moe_top_k": 2,
                "hidden_size": 32,
            },
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        },
    ),
    "deepseek_ocr2": Small("DeepseekOcr2TextConfig", "DeepseekOcr2TextModel"),
    "deepseek_v2": Small(
        "DeepseekV2Config", fields=HEADS | {"topk_method": "group_limited_greedy"}
    ),
    "deepseek_v3": Small("DeepseekV3Config", fields=HEADS),
    "deepseek_v32": Small("DeepseekV32Config", fields=HEADS),
    "deepseek_v4": Small(
        "DeepseekV4Config",
        fields={
            "num_key_value_heads": 1,
            "mlp_layer_types": ["hash_moe"] + ["moe"] * (LAYERS - 1),
            "hc_mult": 2,
            "o_groups": 2,
            "o_lora_rank": 8,
        },
    ),
    "diffusion_gemma": Small(
        "DiffusionGemmaConfig",
        "DiffusionGemmaForBlockDiffusion",
        {"canvas_length": 4, "image_token_id": 96},
        {
            "text_config": Small("DiffusionGemmaTextConfig"),
            "vision_config": Small("Gemma4VisionConfig", fields=HEADS),
        },
    ),
    "doge": Small("DogeConfig", fields={"is_moe": True, "num_experts": 16}),
    "dots1": Small("Dots1Config"),
    "ernie4_5_moe": Small("Ernie4_5_MoeConfig", fields={"moe_layer_start_index": 1}),
    "ernie4_5_vl_moe": Small(
        "Ernie4_5_VLMoeTextConfig",
        "Ernie4_5_VLMoeTextModel",
        {"moe_intermediate_size": [24, 24]} | rope(1, 1, 2),
    ),
    "exaone_moe": Small("ExaoneMoeConfig"),
    "flex_olmo": Small("FlexOlmoConfig"),
    "flint": Small("FlintConfig"),
    "gemma4": Small(
        "Gemma4TextConfig",
        fields={
            "enable_moe_block": True,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "glm4_moe": Small("Glm4MoeConfig"),
    "glm4_moe_lite": Small("Glm4MoeLiteConfig", fields=HEADS),
    "glm4v_moe": Small("Glm4vMoeTextConfig", "Glm4vMoeTextModel", rope(1, 1, 0)),
    "glm5_next": Small(
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
        HEADS | {"index_kpool": 4, "qk_rope_head_dim": 0, "hc_mult": 2},
    ),
    "glm_moe_dsa": Small("GlmMoeDsaConfig", fields=HEADS),
    "gpt_oss": Small("GptOssConfig"),
    "granitemoe": Small("GraniteMoeConfig"),
    "granitemoe_swa": Small("GraniteMoeSWAConfig"),
    "granitemoehybrid": Small("GraniteMoeHybridConfig", fields=MIXED),
    "granitemoeshared": Small("GraniteMoeSharedConfig"),
    "hunyuan_v1_moe": Small("HunYuanMoEV1Config"),
    "hy_v3": Small("HYV3Config"),
    "hy_v4": Small("HYV4Config", fields=HEADS),
    "inkling": Small(
        "InklingTextConfig",
        "InklingTextModel",
        {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 16,
            "d_rel": 4,
            "rel_extent": 16,
        },
    ),
    "jamba": Small(
        "JambaConfig",
        fields={
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
        },
    ),
    "jetmoe": Small("JetMoeConfig", fields={"kv_channels": 8}),
    "kimi_linear": Small("KimiLinearConfig", fields=HEADS | MIXED),
    "kolibri1": Small("Kolibri1Config"),
    "laguna": Small("LagunaConfig"),
    "lfm2_moe": Small("Lfm2MoeConfig", fields={"layer_types": ["full_attention"] * LAYERS}),
    "llama4": Small(
        "Llama4TextConfig",
        fields={
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 48,
        },
    ),
    "longcat_flash": Small(
        "LongcatFlashConfig",
        fields=HEADS | {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "zero_expert_num": 4},
    ),
    "mellum": Small("MellumConfig"),
    "mimo_v2_flash": Small("MiMoV2FlashConfig"),
    "minimax": Small("MiniMaxConfig"),
    "minimax_m2": Small("MiniMaxM2Config"),
    "minimax_m3_vl": Small("MiniMaxM3VLTextConfig", "MiniMaxM3VLTextModel"),
    "mistral4": Small("Mistral4Config", "Mistral4ForCausalLM", HEADS),
    "mistral_large4": Small("MistralLarge4TextConfig", "MistralLarge4TextModel", HEADS),
    "mixtral": Small("MixtralConfig"),
    "muse_spark": Small("MuseSparkTextConfig", "MuseSparkTextModel", {"moe_hidden_size": 16}),
    "nemotron_h": Small(
        "NemotronHConfig",
        fields={
            "layers_block_type": ["attention", "moe"] * (LAYERS // 2),
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "nllb_moe": Small(
        "NllbMoeConfig",
        "AutoModelForSeq2SeqLM",
        {
            "d_model": 32,
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "pad_token_id": 1,
            "bos_token_id": 0,
        },
    ),
    "olmoe": Small("OlmoeConfig"),
    "openai_privacy_filter": Small("OpenAIPrivacyFilterConfig", "AutoModelForTokenClassification"),
    "phimoe": Small("PhimoeConfig"),
    "qwen2_moe": Small("Qwen2MoeConfig"),
    "qwen3_5_moe": Small("Qwen3_5MoeTextConfig"),
    "qwen3_moe": Small("Qwen3MoeConfig", fields={"mlp_only_layers": [1]}),
    "qwen3_next": Small("Qwen3NextConfig"),
    "qwen3_omni_moe": Small("Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextModel"),
    "qwen3_omni_moe.talker": Small(
        "Qwen3OmniMoeTalkerTextConfig",
        "Qwen3OmniMoeTalkerModel",
        rope(2, 1, 1) | {"shared_expert_intermediate_size": 24},
    ),
    "qwen3_vl_moe": Small("Qwen3VLMoeTextConfig", "Qwen3VLMoeTextModel"),
    "qwen3_vl_moe.whole": Small(
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        parts={
            "text_config": Small("Qwen3VLMoeTextConfig"),
            "vision_config": Small(
                "Qwen3VLMoeVisionConfig",
                fields={
                    "depth": 2,
                    "num_heads": 4,
                    "out_hidden_size": 32,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0],
                },
            ),
        },
    ),
    "qwen4_exp": Small(
        "Qwen4ExpTextConfig",
        fields={
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "hc_count": 2,
            "hc_lowrank": 8,
        },
    ),
    "solar_open": Small("SolarOpenConfig"),
    "step3p7": Small("Step3p7TextConfig", "Step3p7TextModel"),
    "switch_transformers": Small(
        "SwitchTransformersConfig",
        "AutoModelForSeq2SeqLM",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_heads": 4,
            "num_decoder_layers": LAYERS,
            "num_sparse_encoder_layers": LAYERS,
            "num_sparse_decoder_layers": LAYERS,
            "decoder_start_token_id": 0,
        },
    ),
    "unlimited_ocr": Small("UnlimitedOcrTextConfig", "UnlimitedOcrTextModel"),
    "zaya": Small("ZayaConfig", fields={"num_experts_per_tok": 1, "router_hidden_size": 16}),
}
