"""The article's Loop 2 values against what the records are, and its reasons against real tensors of a real model."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, replace

import pytest
import torch

from kvlab.execution.adapters import seeded_adapter, with_adapter
from kvlab.execution.model import causal_attend, load_model
from kvlab.memory.kv_store import PagedStore
from kvlab.memory.layout import BLOCK_MAJOR, quarter_split
from kvlab.reuse import compatibility, keys, manifests
from kvlab.reuse.compatibility import examine
from kvlab.study import fixtures
from tests.reuse.worlds import CHANGES, LAYOUTS, RANK0, manifest, published
from tests.support import FIXTURES

GOLDEN = {name: row["expected"] for name, row in json.loads((FIXTURES / "golden.json").read_text()).items()}
FIXTURE = fixtures.load_fixture(FIXTURES / "loop2_identity.json")


def names(record):
    return [f.name for f in fields(record) if f.init]


# ---------------------------------------------------------------- records
def test_five_records():
    ours = ["LogicalCacheABI", "LayoutIdentity", "CacheCompatibilityManifest", "ConcretePrefixKey",
            "CacheIsolationNamespace"]
    made = [getattr(manifests, n, None) or getattr(keys, n) for n in ours]
    assert all(record.__dataclass_params__.frozen for record in made)
    theirs = GOLDEN["L2.records.five"]
    assert len(made) == len(theirs)
    same = [t for o, t in zip(ours, theirs, strict=True) if o == t]
    assert same == theirs[2:]  # the first is M5.1's, the second is LayoutIdentity here: memory has the plain name
    first_line = manifests.LayoutIdentity.__doc__.split(":")[0]
    assert theirs[1] in first_line


def test_the_layouts_fields():
    top, group = GOLDEN["L2.layout.fields"]["top"], GOLDEN["L2.layout.fields"]["cache_group"]
    expanded = [name.removesuffix("|none") for entry in top for name in entry.removesuffix("|none").split("|")]
    assert names(manifests.LayoutIdentity) == expanded
    assert names(manifests.GroupIdentity) == [entry.split("|")[0] for entry in group]


def test_the_layout_has_exactly_the_three_physical_modes():
    legal = []
    for mode in [*GOLDEN["L2.layout.physical_modes"], "heap", "slab"]:
        sizes = {"token_block_size": 4, "physical_page_bytes": None} if mode != "virtual_pages" else {
            "token_block_size": None, "physical_page_bytes": 65536}
        try:
            legal.append(replace(RANK0, physical_mode=mode, **sizes).physical_mode)
        except ValueError:
            continue
    assert legal == GOLDEN["L2.layout.physical_modes"]


def test_the_namespaces_fields():
    ours = names(manifests.CacheIsolationNamespace)
    for mine, said in zip(ours, GOLDEN["L2.namespace.fields"], strict=True):
        head, _, tail = said.removesuffix("_if_supported").partition("_or_")
        alternatives = {head, tail, f"{head}_{tail.rpartition('_')[2]}"}
        assert mine in alternatives, (mine, said)


def test_the_hash_granularity_need_not_be_the_block_size():
    (relation, verdict), = GOLDEN["L2.vllm.hash_granularity"].items()
    assert (relation, verdict) == ("hash_block_size==physical_block_size", "not required")
    finer = replace(RANK0, manifest_id="finer", hash_block_size=2)
    assert finer.hash_block_size != finer.token_block_size
    machine, grant = published(layouts=(RANK0, finer))
    made = manifest(cache_layout_sha256=finer.digest, covered_token_ids=(1, 2, 3, 4, 5, 6), request_id="p2")
    assert machine.publish(grant, "g0/1002@1", "g0", made).outcome == "done"


# ---------------------------------------------------------------- the predicate
def test_eleven_fields_decide_in_the_printed_order():
    ran = list(examine(manifest(), manifest(), LAYOUTS).ran)
    ran.remove("namespace_generation")  # the article's manifest has it, its printed predicate omits it
    assert ran == GOLDEN["L2.compat.check_order"] and len(ran) == GOLDEN["L2.compat.field_count"]
    decides = [n for n in names(manifests.CacheCompatibilityManifest)
               if n in CHANGES and not examine(manifest(), manifest(**{n: CHANGES[n][0]}), LAYOUTS).compatible]
    assert len(decides) - 1 == GOLDEN["L2.compat.field_count"]


def test_what_is_provenance_only():
    changes = dict.fromkeys(names(manifests.CacheCompatibilityManifest), "other") | {n: v for n, (v, _) in
                                                                                      CHANGES.items()}
    harmless = [n for n, v in changes.items() if examine(manifest(), manifest(**{n: v}), LAYOUTS).compatible]
    assert harmless == GOLDEN["L2.compat.provenance_only"]


def test_a_planted_swap_of_two_checks_turns_the_fixture_red(monkeypatch):
    table = dict(compatibility.EQUALITY)
    order = list(table)
    order[2], order[3] = order[3], order[2]
    monkeypatch.setattr(compatibility, "EQUALITY", {n: table[n] for n in order})
    failed = {v.id for v in fixtures.check_fixture(FIXTURE)["golden"] if not v.held}
    assert "L2.compat.check_order" in failed


def test_a_changed_owned_field_is_a_successor():
    assert GOLDEN["L2.immutable_fields"] == "new_successor_identity_never_in_place"
    machine, _ = published()
    before = machine.snapshot()["records"]["g0/1000@1"]
    changed = replace(manifest(), adapter_identity="adapter-2")
    assert changed.digest != manifest().digest  # a new identity
    with pytest.raises(AttributeError):
        manifest().adapter_identity = "adapter-2"  # never in place
    machine.apply({"op": "successor", "namespace": "prod/a"})  # a successor; what p1 holds stays what it was
    after = machine.snapshot()["records"]["g0/1000@1"]
    assert after["manifest_sha256"] == before["manifest_sha256"] and after["manifest"] == before["manifest"]


# ---------------------------------------------------------------- keys
def test_the_shape_of_the_key():
    ours = list(inspect.signature(keys.hash_block).parameters)
    assert ours == [n.split("|")[0] for n in GOLDEN["L2.key.shape"]["block_hash"]]
    assert names(keys.ConcretePrefixKey) == GOLDEN["L2.key.shape"]["lookup_key"]
    assert keys.extra_keys(keys.KeyInputs(), 0, 4) is None  # "or none"


def test_the_generators_of_extra_keys_are_the_observed_ones():
    assert [g.__name__ for g in keys.EXTRA_GENERATORS] == GOLDEN["L2.key.extra_generators"]
    picture = manifests.SideInput("multimodal", 3, 2, "x")
    row = manifests.SideInput("prompt_embedding", 5, 1, "r")
    inputs = {"lora_name": keys.KeyInputs("a"), "multimodal_identifier_with_block_relative_offset":
              keys.KeyInputs(side_inputs=(picture,)), "cache_salt_first_block_only": keys.KeyInputs(cache_salt="s"),
              "sha256_of_covered_prompt_embeddings": keys.KeyInputs(side_inputs=(row,))}
    touched = {name: [j for j in range(3) if keys.extra_keys(made, 4 * j, 4 * j + 4)] for name, made in inputs.items()}
    assert list(touched.values()) == [[0, 1, 2], [0, 1], [0], [1]]


def test_reset_is_named_as_observed_and_ends_old_entries():
    word, _, use = GOLDEN["L2.vllm.reset"].partition(" ")
    assert "weight-update" in use
    machine, grant = published()
    machine.apply({"op": word, "namespace": "prod/a"})
    assert machine.lookup(grant, "g0", manifest(publication_generation=2)).outcome == "miss"


# ---------------------------------------------------------------- why: on a real model and real memory
@pytest.fixture(scope="module")
def model():
    return load_model("austen")[0]


def rows(model, tokens, first=0):
    """K and V rows `[2, layers, n, kv_heads, head_dim]` of a sequence that begins at position `first`."""
    kept = []

    def keep(layer, q, k, v):
        kept.append(torch.stack([k, v]))
        return causal_attend(layer, q, k, v)

    model.forward(torch.tensor(tokens), torch.arange(first, first + len(tokens)), keep)
    return torch.stack(kept, 1)


TOKENS = list(range(40, 56))


def test_because_an_adapter_changes_hidden_states_or_projections(model):
    assert GOLDEN["L2.compat.reject.adapter_identity"]["because"] == "hidden states or effective W_K/W_V change"
    ours, theirs = rows(model, TOKENS), rows(with_adapter(model, seeded_adapter(model, seed=1)), TOKENS)
    assert not torch.allclose(ours[:, 0], theirs[:, 0])  # layer 0: the projections changed
    only_q = with_adapter(model, seeded_adapter(model, seed=1, targets=("q",)))
    queries = rows(only_q, TOKENS)
    assert torch.equal(ours[:, 0], queries[:, 0]) and not torch.allclose(ours[:, 1], queries[:, 1])  # hidden states


def test_because_a_position_gives_a_key_another_transform(model):
    assert "same key row" in GOLDEN["L2.compat.reject.position_contract_sha256"]["because"]
    here, there = rows(model, TOKENS), rows(model, TOKENS, first=16)
    assert torch.equal(here[1, 0], there[1, 0])  # the value row of layer 0 is the same
    assert not torch.allclose(here[0, 0], there[0, 0], atol=0.1)  # its key row is not


def test_because_a_rank_or_group_holds_other_heads(model):
    assert "same shape" in GOLDEN["L2.compat.reject.tp_rank_or_cache_group"]["because"]
    assert GOLDEN["L2.layout.same_bytes_other_rank"] == "different_local_heads"
    k = rows(model, TOKENS)[0, 0]
    rank0, rank1 = k.chunk(2, dim=1)
    assert rank0.shape == rank1.shape and not torch.allclose(rank0, rank1, atol=0.1)


def test_because_the_same_bytes_decode_otherwise(model):
    assert "same bytes" in GOLDEN["L2.compat.reject.storage_dtype_or_quantization"]["because"]
    assert GOLDEN["L2.layout.same_bytes_other_dtype"] == "different_numerical_meaning"
    half = rows(model, TOKENS)[0, 0].half()
    other = half.view(torch.bfloat16)
    assert other.nbytes == half.nbytes and not torch.allclose(half.float(), other.float(), atol=0.1)


@pytest.mark.parametrize("name", ["multimodal_feature_identity", "prompt_embedding_identity"])
def test_because_a_side_input_differs_before_hidden_states(model, name):
    """A placeholder's embedding row is replaced; the token ids stay, and every layer's rows differ."""
    assert "before hidden states" in GOLDEN[f"L2.compat.reject.{name}"]["because"]
    embed, made = model.weights.embed, []
    for seed in (1, 2):
        changed = embed.clone()
        changed[TOKENS[3]] = torch.randn(embed.shape[1], generator=torch.Generator().manual_seed(seed))
        model.weights = replace(model.weights, embed=changed)
        made.append(rows(model, TOKENS))
    model.weights = replace(model.weights, embed=embed)
    assert torch.equal(made[0][:, :, :3], made[1][:, :, :3])
    assert not torch.allclose(made[0][:, 0, 3], made[1][:, 0, 3], atol=0.1)
    assert not torch.allclose(made[0][:, -1, 4:], made[1][:, -1, 4:], atol=1e-4)


def test_the_same_block_id_in_another_group_is_another_object():
    assert GOLDEN["L2.layout.same_id_other_group"] == "different_physical_object"
    store = PagedStore(quarter_split(4, 2, 8, 4, block_size=4, num_blocks=3))
    one, other = store.k[0][:, 1], store.k[1][:, 1]
    assert one.data_ptr() != other.data_ptr()
    one.fill_(1.0)
    assert torch.isnan(other).all()


def test_the_same_block_size_under_another_stride_is_another_address():
    assert GOLDEN["L2.layout.same_block_size_other_stride"] == "different_address"
    stores = [PagedStore(quarter_split(4, 2, 8, 4, block_size=4, num_blocks=3, axis_order=order))
              for order in (manifests.AXES, BLOCK_MAJOR)]
    at = [s.k[0][1, 2, 3].data_ptr() - s.k[0].data_ptr() for s in stores]
    assert stores[0].k[0].shape == stores[1].k[0].shape and at[0] != at[1]
