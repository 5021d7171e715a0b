"""What belongs to a model besides weights and config.json: tokenizer, generation settings ..."""

import shutil
from pathlib import Path

# Code (*.py) is not copied.
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "chat_template*",
    "*.tiktoken",
    "LICENSE*",
)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy them from one folder to another."""
    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.suffix != ".py":
                shutil.copyfile(path, folder / path.name)
    if (source / "chat_templates").is_dir():
        shutil.copytree(source / "chat_templates", folder / "chat_templates", dirs_exist_ok=True)
