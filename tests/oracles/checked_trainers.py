"""Trainers of transformers and TRL to check: right ones, and settings and versions of them that were wrong."""

from typing import Any

import datasets  # pyright: ignore[reportMissingImports]
import tokenizers
import torch
import transformers  # pyright: ignore[reportMissingImports]
import trl  # pyright: ignore[reportMissingImports]

WORDS = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{n}" for n in range(60))])}


def llama(**settings: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **settings))


def tokenizer() -> Any:
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<eos>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>", unk_token="<eos>"
    )


def texts() -> Any:
    rows = [{"text": " ".join(f"w{(n * 7 + k * k) % 60}" for k in range(3 + n))} for n in range(20)]
    return datasets.Dataset.from_list(rows)


def sft(kind: Any = None, model: Any = None, **given: Any) -> Any:
    """TRL's SFTTrainer, which divides by the tokens of all micro-batches and ranks."""
    args = trl.SFTConfig(**{"output_dir": "unused", "bf16": False, **given})
    return (kind or trl.SFTTrainer)(model or llama(), args, train_dataset=texts(), processing_class=tokenizer())


def padding_free(**given: Any) -> Any:
    return sft(**{"padding_free": True, "max_length": None, **given})


def packed(**given: Any) -> Any:
    return sft(**{"packing": True, "max_length": 64, **given})


def wrapped(**given: Any) -> Any:
    """Rows are cut from one long text: documents see each other."""
    return sft(**{"packing": True, "packing_strategy": "wrapped", "max_length": 64, **given})


def per_rank(**given: Any) -> Any:
    """Each rank divides by its own tokens."""
    return sft(**{"average_tokens_across_devices": False, **given})


def with_dropout(**given: Any) -> Any:
    return sft(model=llama(attention_dropout=0.1), **given)


class Before446(trl.SFTTrainer):
    """Divides as transformers did before 4.46: the mean of each micro-batch, and by their number."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.model_accepts_loss_kwargs = False

    def get_batch_samples(self, *args: Any, **named: Any) -> Any:
        return super().get_batch_samples(*args, **named)[0], None


def before_446(**given: Any) -> Any:
    return sft(Before446, **given)


def plain(**given: Any) -> Any:
    """transformers' own Trainer."""
    args = transformers.TrainingArguments(**{"output_dir": "unused", "bf16": False, **given})
    encode = tokenizer()
    rows = [{"input_ids": encode(row["text"])["input_ids"]} for row in texts()]
    collator = transformers.DataCollatorForLanguageModeling(encode, mlm=False)
    return transformers.Trainer(llama(), args, train_dataset=rows, data_collator=collator)
