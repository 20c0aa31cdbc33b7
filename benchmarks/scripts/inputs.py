"""Inputs of the scripts instead of downloads: text of the standard library, small models with random weights."""

import json
import random
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from examples import stdlib_text

METRIC = """
import datasets
import evaluate
class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)
    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
"""


def lines() -> list[str]:
    """Lines of source with some words each, the same each time."""
    text = bytes(stdlib_text.read(limit=4_000_000)[0].tolist()).decode("utf-8", "ignore")
    return [line.strip() for line in text.splitlines() if 8 <= len(line.split()) <= 16]


def for_accelerate(folder: Path) -> None:
    """GLUE's MRPC, the metric of that name, and bert-base-cased, by the names that the script asks for."""
    chosen, draw = lines(), random.Random(0)
    data = folder / "nyu-mll" / "glue"
    (data / "mrpc").mkdir(parents=True)
    paths = []
    for split, rows in (("train", 320), ("validation", 64)):
        with (data / "mrpc" / f"{split}.jsonl").open("w") as file:
            for index in range(rows):
                first, other = draw.sample(chosen, 2)
                label = draw.randrange(2)
                second = " ".join(draw.sample(words := first.split(), len(words))) if label else other
                file.write(json.dumps({"idx": index, "sentence1": first, "sentence2": second, "label": label}) + "\n")
        paths.append(f"  - split: {split}\n    path: mrpc/{split}.jsonl\n")
    (data / "README.md").write_text("---\nconfigs:\n- config_name: mrpc\n  data_files:\n" + "".join(paths) + "---\n")
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(chosen, trainers.WordPieceTrainer(vocab_size=4000, special_tokens=special))
    BertTokenizerFast(vocab=made.get_vocab(), do_lower_case=False).save_pretrained(folder / "bert-base-cased")
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(vocab_size=4000, **sizes)).save_pretrained(folder / "bert-base-cased")


def for_lightning(folder: Path) -> None:
    """WikiText2's file, where its download is looked for: the 2000 commonest words, others as `<unk>`."""
    words = [re.findall(r"\w+|[^\w\s]", line) for line in lines()]
    counts: dict[str, int] = {}
    for word in (word for line in words for word in line):
        counts[word] = counts.get(word, 0) + 1
    known = set(sorted(counts, key=lambda word: -counts[word])[:2000])
    (folder / "data").mkdir()
    text = "\n".join(" ".join(word if word in known else "<unk>" for word in line) for line in words)
    (folder / "data" / "wikitext-2.txt").write_text(text)


def for_peft(folder: Path) -> None:
    """A folder of texts, and a small Llama with its tokenizer."""
    chosen = lines()
    (folder / "texts").mkdir()
    for split, rows in (("train", 400), ("test", 16)):
        with (folder / "texts" / f"{split}.jsonl").open("w") as file:
            for index in range(rows):
                file.write(json.dumps({"text": "\n".join(chosen[8 * index : 8 * index + 8])}) + "\n")
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.train_from_iterator(chosen, trainers.BpeTrainer(vocab_size=2000, special_tokens=["<unk>", "<s>", "</s>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "llama")
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=2000, max_position_embeddings=256, **sizes)).save_pretrained(
        folder / "llama"
    )
