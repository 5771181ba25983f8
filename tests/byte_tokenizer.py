"""A tokenizer of single bytes, for models that know no words."""

import tokenizers

SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_backend(special: list[str], size: int) -> tokenizers.Tokenizer:
    """Special tokens, then the 256 bytes, then unused tokens up to `size`."""
    texts = [*special, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    texts += [f"unused{i}" for i in range(size - len(texts))]
    vocab = {text: i for i, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(special)
    return backend
