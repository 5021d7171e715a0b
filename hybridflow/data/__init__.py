"""Prompts: reading files, chat templates, token ids, and the order in which they are drawn."""

from hybridflow.data.dataset import PromptDataset, PromptRow, load_dataset
from hybridflow.data.readers import Table, read_table
from hybridflow.data.stream import PromptStream
from hybridflow.data.tokenizer import load_tokenizer

__all__ = [
    "PromptDataset",
    "PromptRow",
    "PromptStream",
    "Table",
    "load_dataset",
    "load_tokenizer",
    "read_table",
]
