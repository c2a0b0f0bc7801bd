"""Files of checkpoint folders."""

from pathlib import Path

# What goes with a checkpoint beside its weights and configuration.
TOKENIZER = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"a": 1}',
    "special_tokens_map.json": "{}",
    "tokenizer.model": "pieces",
    "merges.txt": "a b",
    "vocab.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "LICENSE": "as it says",
}


def add(folder: Path, files: dict[str, str]) -> Path:
    """Write text files into a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
