"""What the two processes of tests/conversions/test_sharded.py do. A module of its own: spawned processes import it."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_llama import assert_close, assert_same_tensors, bits, native_class, read_tensors, stock_class, token_batch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def start(rank: int, world: int, folder: str) -> None:
    """Join a gloo group of `world` processes that meet in a file of `folder`."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)


def exported(folder: str, config) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors. A gathered state dict no longer shows a tie, so the head is written too: the same bits."""
    tensors = read_tensors(Path(folder))
    if config.tie_word_embeddings:
        assert torch.equal(bits(tensors.pop("lm_head.weight")), bits(tensors["model.embed_tokens.weight"]))
    return tensors


def fully_sharded(rank: int, world: int, folder: str, source: str) -> None:
    """FSDP2 after loading: loss, gradients and export of the unsharded model; then a step, which must be stock's step."""
    start(rank, world, folder)
    plain = stock_class("causal").from_pretrained(source).train()
    model = native_class("causal").from_pretrained(source).train()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=full)
    if rank == 0:
        model.save_pretrained(f"{folder}/before", state_dict=state)
        assert_same_tensors(exported(f"{folder}/before", model.config), read_tensors(Path(source)))
    dist.barrier()

    batches = [token_batch(2, 9, seed=number) for number in range(world)]
    expected = sum(plain(input_ids=ids, labels=ids).loss for ids in batches) / world
    expected.backward()
    loss = model(input_ids=batches[rank], labels=batches[rank]).loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    assert_close(mean / world, expected, what="loss")
    with torch.no_grad():
        for stepped in (plain, model):
            for parameter in stepped.parameters():
                parameter.sub_(0.5 * parameter.grad)
    state = get_model_state_dict(model, options=full)
    if rank == 0:
        model.save_pretrained(f"{folder}/after", state_dict=state)
        plain.save_pretrained(f"{folder}/expected")
        actual, stepped = exported(f"{folder}/after", model.config), read_tensors(Path(folder) / "expected")
        before = read_tensors(Path(source))
        assert sorted(actual) == sorted(stepped)
        for name, tensor in stepped.items():
            assert not torch.equal(tensor, before[name]), f"{name} did not move and shows nothing"
            assert_close(actual[name], tensor, what=name)
    dist.barrier()
    dist.destroy_process_group()


def sharding_load(rank: int, world: int, folder: str, source: str) -> None:
    """Each way to shard while loading is refused, or gives the stock logits: never wrong ones."""
    start(rank, world, folder)
    from transformers.distributed import DistributedConfig

    ids = token_batch()
    with torch.no_grad():
        expected = stock_class("causal").from_pretrained(source)(ids).logits
    ways = {
        "tp_plan": lambda: {"tp_plan": "auto"},
        "tp_size": lambda: {"tp_plan": "auto", "tp_size": world},
        "fsdp": lambda: {"distributed_config": DistributedConfig(fsdp_size=world)},
        "tp": lambda: {"distributed_config": DistributedConfig(tp_size=world)},
        "dictionary": lambda: {"distributed_config": {"tp_size": world}},
    }
    for name, options in ways.items():
        for cls in (native_class("causal"), native_class("base")):
            try:
                model = cls.from_pretrained(source, **options())
            except NotImplementedError as refusal:
                assert "tp_plan" in str(refusal) or "distributed_config" in str(refusal), f"{name}: {refusal}"
                continue
            if cls is native_class("causal"):
                with torch.no_grad():
                    assert_close(model(ids).logits, expected, what=name)
    dist.barrier()
    dist.destroy_process_group()
