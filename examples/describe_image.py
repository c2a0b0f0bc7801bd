"""Questions about real photographs, through InternVL: preprocess, train, answer, export.

    python examples/describe_image.py [--output <folder>]

The photographs are those that scikit-image and scikit-learn bring (`pip install scikit-image`), the image processor is the
real one, which cuts a photograph into tiles. The model is a tiny one with random weights: it knows nothing before it is
trained on the two answers, and afterwards it can tell the photographs apart only by what it sees. The export is loaded with
the stock class, which has to give the same answers. Each step is checked, and the first check that fails ends the run with
status 1. On two CPU cores it takes under a minute.
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from PIL import Image
from rich.console import Console
from transformers import GotOcr2ImageProcessorPil, InternVLConfig, InternVLForConditionalGeneration, set_seed

from liger_models import LigerInternVLForConditionalGeneration

QUESTION = "What does the photograph show?\n"
# For each package: the folder of its photographs, and for two of them the answer.
PHOTOGRAPHS = {
    "skimage": ("data", {"astronaut.png": "An astronaut.", "coffee.png": "A cup of coffee."}),
    "sklearn": ("datasets/images", {"china.jpg": "A temple.", "flower.jpg": "A dahlia in bloom."}),
}
TILE, PATCH, MOST_TILES = 64, 8, 4  # pixels, pixels, tiles of a photograph besides the thumbnail of the whole
TOKENS_OF_TILE = (TILE // PATCH // 2) ** 2
# Text is its bytes. The other tokens stand around an image, for a part of one, and at an answer's end.
IMAGE_BEGINS, IMAGE_ENDS, IMAGE_PART, END, VOCABULARY = 256, 257, 258, 259, 260
LEARNING_RATE = 3e-3

console = Console(highlight=False)


class CheckFailed(RuntimeError):
    """A step that did not give what it has to."""


def photographs() -> dict[Path, str]:
    """Two photographs on this machine, and what there is to say of them."""
    for package, (folder, answers) in PHOTOGRAPHS.items():
        found = importlib.util.find_spec(package)
        for root in (found.submodule_search_locations or []) if found else []:
            paths = {Path(root) / folder / name: answer for name, answer in answers.items()}
            if all(path.exists() for path in paths):
                return paths
    raise CheckFailed("no photographs: pip install scikit-image (or scikit-learn), whose wheels hold some")


def inputs_for(photograph: Path, answer: str = "") -> dict[str, torch.Tensor]:
    """What the model takes for a photograph, the question and an answer to learn: tokens, pixels of the tiles, labels."""
    processor = GotOcr2ImageProcessorPil(
        size={"height": TILE, "width": TILE}, crop_to_patches=True, min_patches=1, max_patches=MOST_TILES
    )
    pixels = processor(Image.open(photograph).convert("RGB"), return_tensors="pt")
    tiles = int(pixels["num_patches"][0])
    prompt = [IMAGE_BEGINS, *[IMAGE_PART] * (TOKENS_OF_TILE * tiles), IMAGE_ENDS, *QUESTION.encode()]
    learned = [*answer.encode(), END] if answer else []
    tokens = torch.tensor([prompt + learned])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **pixels}  # num_patches too: it is ignored
    if learned:
        inputs["labels"] = torch.tensor([[-100] * len(prompt) + learned])
    return inputs


def tiny_model() -> LigerInternVLForConditionalGeneration:
    """An InternVL of a million parameters, with random weights."""
    set_seed(0)
    text = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    vision = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": TILE,
        "patch_size": PATCH,
        "attention_bias": True,
    }
    config = InternVLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_PART,
        image_seq_length=TOKENS_OF_TILE,
        tie_word_embeddings=False,
    )
    return LigerInternVLForConditionalGeneration(config)


def train(model: LigerInternVLForConditionalGeneration, examples: dict[Path, str], steps: int) -> list[float]:
    """Learn the answers, one photograph after the other. The losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches, losses = [inputs_for(path, answer) for path, answer in examples.items()], []
    model.train()
    for step in range(steps):
        loss = model(**batches[step % len(batches)]).loss  # no logits in memory
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def answer_of(model: torch.nn.Module, photograph: Path) -> str:
    inputs = inputs_for(photograph)
    inputs.pop("num_patches")  # of the processor's keys generate accepts only those that some model knows
    tokens = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return bytes(token for token in tokens.tolist() if token < 256).decode(errors="replace")


def check(holds: bool, message: str) -> None:
    if not holds:
        raise CheckFailed(message)


def run(steps: int, output: Path) -> None:
    examples = photographs()
    model = tiny_model()
    for path in examples:
        tiles = inputs_for(path)["pixel_values"].shape[0]
        console.print(f"{path.name}: {tiles} tiles, {tiles * TOKENS_OF_TILE} image tokens")
    losses = train(model, examples, steps)
    console.print(f"{steps} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    model.save_pretrained(output)
    stock = InternVLForConditionalGeneration.from_pretrained(output).eval()
    for path, answer in examples.items():
        found, of_stock = answer_of(model, path), answer_of(stock, path)
        console.print(f"{QUESTION.strip()} {path.name}: {found}")
        check(found == answer, f"{path.name}: {found!r} and not {answer!r}")
        check(of_stock == found, f"the stock class answers {of_stock!r} from the exported checkpoint, not {found!r}")
    console.print(f"the stock class gives the same answers from {output}")


def main(
    output: Annotated[Path | None, typer.Option(help="Where to export the model; a temporary folder by default.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 80,
) -> None:
    """Ask about photographs, learn the answers, and ask again."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(steps, Path(folder) / "model" if output is None else output)
    except CheckFailed as failure:
        console.print(f"failed: {failure}", style="red", markup=False)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
