"""Folders of tokenizers as transformers saves them, made by transformers and tokenizers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

SENTENCES = [
    "a seven above a three",
    "the cat sat on the mat, and the dog didn't",
    "two photographs of a café at night",
    "three digits: one, two and nine",
] * 4


def save_clip_tokenizer(folder: Path, more: Sequence[str] = ()) -> Any:
    """Save transformers' ``CLIPTokenizer`` with a small vocabulary, which has ``more`` tokens."""
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e</w>"), ("a", "n"), ("an", "d</w>"), ("c", "at</w>")]
    merges.insert(4, ("a", "t</w>"))
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
    tokens += [*more, "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=merges)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_siglip_tokenizer(folder: Path) -> Any:
    """Save a tokenizer as SigLIP's, of unigrams with </s> as end and padding, and return it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=specials, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="</s>", eos_token="</s>", unk_token="<unk>"
    )
    made.save_pretrained(folder)
    return made
