"""The computed address is where the scalar is: read from this process's own memory, in every layout there is."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvlab.memory.address import follow, resolve
from kvlab.memory.address_bytes import address_snapshot, lay_out, read_scalar
from kvlab.memory.address_records import AddressSnapshot, BlockDescriptor, GroupLayout, PhysicalRef, RequestSnapshot
from kvlab.memory.address_snapshot import validate
from kvlab.memory.address_sources import relaid
from kvlab.memory.allocator import Allocator
from kvlab.memory.kv_store import PagedStore
from kvlab.memory.layout import AXES, INNER_LANE, KV_KIND, quarter_split

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LAYERS, SLOTS, TOKENS, HEADS, LANES = 3, 5, 4, 2, 8
CONTEXT = 14


def same(read, wanted):
    """Equal to the bit, NaN included."""
    return read.dtype == wanted.dtype and read.reshape(1).view(torch.uint8).equal(wanted.reshape(1).view(torch.uint8))


def group_on(slots, dtype=torch.float32):
    """A group whose logical block j stands on slot slots[j]; a request A that sees 14 tokens of it."""
    blocks = {70 + j: BlockDescriptor(70 + j, slot, min(TOKENS, CONTEXT - j * TOKENS), "p", 9)
              for j, slot in enumerate(slots)}
    width = torch.empty(0, dtype=dtype).element_size()
    group = GroupLayout("g", 0, LAYERS, TOKENS, HEADS, LANES, AXES, (LAYERS, SLOTS, TOKENS, HEADS, LANES), width,
                        {"K": 0, "V": 0}, {"K": 0, "V": 0}, "p", 9, SLOTS, blocks)
    table = tuple(PhysicalRef("g", "p", 9, 70 + j) for j in range(len(slots)))
    return group, RequestSnapshot("A", CONTEXT, 1, {"g": table})


def check_layout(order, lanes, dtype, seed, samples):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    slots = rng.sample(range(SLOTS), 4)
    group, request = group_on(slots, dtype)
    shape = (LAYERS, SLOTS, TOKENS, HEADS, LANES)
    rows = {kind: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for kind in "KV"}
    group, tensors = lay_out(relaid(group, order, lanes), rows["K"], rows["V"])
    snapshot = AddressSnapshot((group,), {"A": request}, 1, LAYERS)
    validate(snapshot)
    for _ in range(samples):
        token, layer, kind = rng.randrange(CONTEXT), rng.randrange(LAYERS), rng.choice("KV")
        head, lane = rng.randrange(HEADS), rng.randrange(LANES)
        trace = resolve(snapshot, "A", token, layer, kind, head, lane)
        wanted = rows[kind][layer, slots[token // TOKENS], token % TOKENS, head, lane]
        assert same(read_scalar(trace, dtype), wanted), (order, lanes, trace)
        assert trace.slot_id == slots[token // TOKENS] * TOKENS + token % TOKENS
    del tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_order_of_the_five_axes(dtype):
    for seed, order in enumerate(itertools.permutations(AXES)):
        check_layout(order, 1, dtype, seed, samples=6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_k_and_v_interleaved_at_any_place(dtype):
    orders = list(itertools.permutations((*AXES, KV_KIND)))
    for seed, order in enumerate(orders[:: 6 + DTYPES.index(dtype)]):
        check_layout(order, 1, dtype, seed, samples=4)


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_packed_lanes_at_any_place(lanes):
    orders = list(itertools.permutations((*AXES, INNER_LANE)))
    for seed, order in enumerate(orders[lanes::9]):
        check_layout(order, lanes, DTYPES[seed % 4], seed, samples=4)


def test_packed_and_interleaved_at_once():
    orders = list(itertools.permutations((*AXES, KV_KIND, INNER_LANE)))
    for seed, order in enumerate(orders[::101]):
        check_layout(order, 4, DTYPES[seed % 4], seed, samples=4)


def test_vllms_k_cache():
    order = ("layer_local", "physical_slot", "kv_head_local", "head_dim", "token_offset", INNER_LANE)
    check_layout(order, 4, torch.float16, 3, samples=40)


@pytest.mark.parametrize("order", list(itertools.permutations(AXES))[::7], ids=lambda o: "-".join(a[0] for a in o))
def test_the_store_under_a_real_allocator(order):
    layout = quarter_split(4, 2, 6, 4, block_size=4, num_blocks=9, axis_order=order)
    allocator, store = Allocator(layout, queue_seed=11), PagedStore(layout)
    allocator.mover = store.copy_rows
    for tensor in (*store.k, *store.v):
        tensor.copy_(torch.rand(tensor.shape))
    allocator.allocate("A", 11)
    allocator.fork("A", "B")
    allocator.append("B", 3)
    snapshot, rng = address_snapshot(store, allocator.snapshot()), random.Random(5)
    validate(snapshot)
    for _ in range(60):
        name = rng.choice("AB")
        live, token, layer = allocator.requests[name], 0, rng.randrange(4)
        token = rng.randrange(live.context)
        kind, head, lane = rng.choice("KV"), rng.randrange(2), rng.randrange(6)
        trace = resolve(snapshot, name, token, layer, kind, head, lane)
        g, keys, values = store.layers[layer]
        block = allocator.snapshot()["requests"][name]["tables"][f"g{g}"][token // 4]
        index = int(block.split("@")[0]) - layout.groups[g].first_block_id
        wanted = (keys if kind == "K" else values)[index, token % 4, head, lane]
        assert read_scalar(trace, torch.float32) == wanted
        assert trace.physical_ref.block_generation == int(block.split("@")[1])


def test_reading_needs_an_address_and_the_right_width():
    group, request = group_on([2, 0, 1, 4])
    group, tensors = lay_out(group, *torch.rand(2, LAYERS, SLOTS, TOKENS, HEADS, LANES))
    snapshot = AddressSnapshot((group,), {"A": request}, 1, LAYERS)
    trace = resolve(snapshot, "A", 0, 0, "K", 0, 0)
    with pytest.raises(ValueError, match="bytes"):
        read_scalar(trace, torch.float16)
    with pytest.raises(ValueError, match="outside_request_context"):
        read_scalar(follow(snapshot, "A", CONTEXT, 0, "K", 0, 0), torch.float32)
    del tensors


def test_lanes_that_do_not_divide_the_head():
    with pytest.raises(ValueError, match="do not divide"):
        relaid(group_on([0, 1, 2, 3])[0], (*AXES, INNER_LANE), 3)
