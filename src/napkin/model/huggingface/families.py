"""The families of Hugging Face models that can be read and written, by the `model_type` of config.json."""

from napkin.model.huggingface.family import Family
from napkin.model.huggingface.gpt2 import Gpt2Settings, gpt2_mappings, read_gpt2, write_gpt2
from napkin.model.huggingface.llama import (
    Gemma2Settings,
    GraniteSettings,
    LlamaSettings,
    MistralSettings,
    MixtralSettings,
    Olmo2Settings,
    Qwen2Settings,
    Qwen3Settings,
    gemma2_mappings,
    granite_factors,
    llama_mappings,
    read_gemma2,
    read_granite,
    read_llama,
    read_mistral,
    read_mixtral,
    read_olmo2,
    read_qwen2,
    read_qwen3,
    write_gemma2,
    write_granite,
    write_llama,
    write_mistral,
    write_mixtral,
    write_olmo2,
    write_qwen2,
    write_qwen3,
)

# A model is saved as the first of these that has all its settings.
FAMILIES = {
    "gpt2": Family("transformer.", gpt2_mappings, Gpt2Settings, read_gpt2, write_gpt2),
    "llama": Family("model.", llama_mappings, LlamaSettings, read_llama, write_llama),
    "granite": Family("model.", llama_mappings, GraniteSettings, read_granite, write_granite, granite_factors),
    "mistral": Family("model.", llama_mappings, MistralSettings, read_mistral, write_mistral),
    "mixtral": Family("model.", llama_mappings, MixtralSettings, read_mixtral, write_mixtral),
    "qwen2": Family("model.", llama_mappings, Qwen2Settings, read_qwen2, write_qwen2),
    "qwen3": Family("model.", llama_mappings, Qwen3Settings, read_qwen3, write_qwen3),
    "olmo2": Family("model.", llama_mappings, Olmo2Settings, read_olmo2, write_olmo2),
    "gemma2": Family("model.", gemma2_mappings, Gemma2Settings, read_gemma2, write_gemma2),
}
