"""Trap 3: sharding after loading is exact; sharding while loading, which would cut packed weights, is refused."""

import pytest
import sharded_worker
import torch
from tiny_llama import CASES, native_class, save_stock
from transformers.distributed import DistributedConfig


@pytest.mark.parametrize("case", ["one_kv_head", "tied"])
def test_fully_shard_after_loading(tmp_path, case):
    source = save_stock(tmp_path / "in", **CASES[case])
    torch.multiprocessing.spawn(sharded_worker.fully_sharded, args=(2, str(tmp_path), str(source)), nprocs=2)


def test_sharding_while_loading_in_two_processes(tmp_path):
    source = save_stock(tmp_path / "in")
    torch.multiprocessing.spawn(sharded_worker.sharding_load, args=(2, str(tmp_path), str(source)), nprocs=2)


@pytest.mark.parametrize("head", ["base", "causal", "classification"])
@pytest.mark.parametrize(
    "options",
    [
        {"tp_plan": "auto"},
        {"tp_plan": {"model.layers.*.mlp.down_proj": "rowwise"}},
        {"tp_size": 2},
        {"distributed_config": DistributedConfig(tp_size=2)},
        {"distributed_config": DistributedConfig(fsdp_size=2)},
        {"distributed_config": {"fsdp_size": 2}},
    ],
    ids=str,
)
def test_sharding_arguments_are_refused(tmp_path, head, options):
    """Before anything is loaded, so also outside a process group, and with the way out."""
    with pytest.raises(NotImplementedError, match=rf"{next(iter(options))}[\s\S]*fully_shard"):
        native_class(head).from_pretrained(tmp_path / "is not even read", **options)


def test_sharding_that_the_configuration_asks_for_is_refused(tmp_path):
    """transformers keeps a distributed_config on the configuration object; a caller may hand it on."""
    source = save_stock(tmp_path / "in")
    config = native_class("causal").config_class.from_pretrained(source)
    config.distributed_config = DistributedConfig(tp_size=2)
    try:
        model = native_class("causal").from_pretrained(source, config=config)
    except (NotImplementedError, ValueError) as refusal:
        assert "distributed_config" in str(refusal)
        return
    assert getattr(model, "_tp_size", None) in (None, 1)
    assert model.model.layers[0].self_attn.qkv_proj.weight.shape == (64, 32)


def test_native_model_names_no_plan_for_packed_parts():
    """A plan for q_proj or gate_proj would match the views, and shard nothing or the wrong thing."""
    from tiny_llama import tiny_config

    model = native_class("causal")(tiny_config())
    named = {name.rpartition(".")[2] for name in (model.tp_plan or {})}
    assert not named & {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
