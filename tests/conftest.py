"""Tiny random checkpoints of every case of every family, and the pair of models, stock and native, that load from one."""

import pytest
from models.families import Case, randomise


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Folder of the stock checkpoint of a case and head; written once."""
    folders = {}

    def folder_of(case: Case, head: str = "causal_lm", **options):
        key = (case, head, repr(options))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(str(case))
            configuration = case.configuration()
            configuration.update(options)
            model = case.family.stock(head)(configuration)
            randomise(model)
            model.save_pretrained(folders[key])
        return folders[key]

    return folder_of


@pytest.fixture(scope="session")
def build(checkpoint):
    """Load a case's checkpoint, as `"stock"` or as `"native"`, with the options of from_pretrained."""

    def load(kind: str, case: Case, head: str = "causal_lm", saved_as: str | None = None, saved_with=None, **options):
        folder = checkpoint(case, saved_as or head, **(saved_with or {}))
        if kind == "stock":  # transformers before 5.24 runs Gemma 2 on sdpa unasked, which leaves its cap out
            options.setdefault("attn_implementation", case.family.attentions[-1])
        return getattr(case.family, kind)(head).from_pretrained(folder, **options).train(False)

    return load


@pytest.fixture(scope="session")
def pair(build):
    """The stock and the native model of one checkpoint, in eval mode."""

    def load(case: Case, head: str = "causal_lm", **options):
        return build("stock", case, head, **options), build("native", case, head, **options)

    return load
