"""The article's Loop 6 values that are orders, field lists or classes, against what the index really is and does."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvlab.contract import Rejected
from kvlab.reuse.chain import HASHES, tail_key
from kvlab.reuse.prefix_receipts import PrefixMatchReceipt, common_frontier
from kvlab.reuse.token_keys import pack
from kvlab.study import fixtures
from tests.reuse.prefix_worlds import TOKENS, asker, index, published
from tests.support import FIXTURES, ROOT, require

GOLDEN = {name: row["expected"] for name, row in json.loads((FIXTURES / "golden.json").read_text()).items()}
LOOP6 = [fixtures.load_fixture(path) for path in sorted(FIXTURES.glob("loop6_*.json"))]


def test_the_receipts_fields():
    assert [f.name for f in fields(PrefixMatchReceipt)] == GOLDEN["L6.receipt.fields"]
    assert PrefixMatchReceipt.__dataclass_params__.frozen
    said = published()[0].lookup(asker(), "x", TOKENS).receipt.to_dict()
    assert set(said) - set(GOLDEN["L6.receipt.fields"]) == {"policy_decision"}


def test_four_questions_have_four_answers():
    cache, ann = published()
    cache.apply({"op": "evict", "blocks": [["1002@1", "2002@1"]]})
    own = cache.lookup(ann, "x", TOKENS[:32]).lengths
    later = cache.lookup(ann, "x", TOKENS).lengths
    answers = [later.semantic, later.indexed, own.runtime, own.recompute + later.recompute]
    assert len(set(answers)) == len(GOLDEN["L6.questions"]) == 4
    assert answers == [50, 32, 16, 34]


def test_the_chain_of_lengths_holds_wherever_a_fixture_looks():
    terms = [t.replace(" ", "") for t in GOLDEN["L6.lengths.chain"].split("<=")]
    assert terms == ["0", "S_runtime", "min(S_sem,S_indexed,S_cap)", "S_prompt"]
    seen = 0
    for fixture in LOOP6:
        for result in fixtures.play(fixture).results.values():
            own = (result.get("answer") or {}).get("lengths") if isinstance(result.get("answer"), dict) else None
            if own:
                row = [eval(term, {"min": min} | own) for term in terms]
                assert row == sorted(row) and own["S_recompute"] == own["S_prompt"] - own["S_runtime"]
                seen += 1
    assert seen > 30


def test_eight_positive_traces_and_22_refusals():
    asserted = {value["id"] for fixture in LOOP6 for value in fixture["expect"]}
    named = {f"L6.trace.{word}" for word in
             ("miss", "full48", "p50", "one_block", "divergence37", "no_logits48", "group_missing", "partial50")}
    assert len(asserted & named) == GOLDEN["L6.positive_count"]
    reasons = {negative["reason"] for fixture in LOOP6 for negative in fixture["negatives"]}
    refined = {"stale_block_generation", "touch_without_identity", "in_place_relabel", "valid_rows_below_view"}
    assert len(reasons - refined) == GOLDEN["L6.negative_count"]


def test_each_part_of_a_tails_key_changes_it():
    def key(parent=b"p" * 32, tokens=(1, 2), policy="immutable_partial", extras=b""):
        return tail_key(HASHES["sha256"], parent, pack(tokens), policy, extras)

    changes = {"parent_hash": {"parent": b"q" * 32}, "tail_tokens[0:v]": {"tokens": (1, 3)}, "v": {"tokens": (1, 2, 0)},
               "partial_policy_id": {"policy": "another"}, "extra_keys": {"extras": b"[]"}}
    assert list(changes) == GOLDEN["L6.hash.tail"]
    assert len({key(), *(key(**change) for change in changes.values())}) == 6


def test_alignment_and_block_size_are_two_units():
    cache, ann = published(alignment=32)
    hit = cache.lookup(ann, "x", TOKENS[:48]).lengths
    assert hit.cap == 47
    printed = min(3, 47 // 32) * 16  # blocks limited by the alignment, then counted in blocks: the printed pseudo-code
    assert {"correct_hit": hit.runtime, "pseudo_code_as_printed": printed} == GOLDEN["L6.align.mixed_units"]


def test_the_candidate_is_only_ever_lowered():
    assert GOLDEN["L6.vllm.hybrid_convergence"] == "monotone_reduction_to_common_hit"
    asked = []

    def group(*boundaries):
        def find(limit):
            asked.append(limit)
            return max((b for b in boundaries if b <= limit), default=0)
        return find

    assert common_frontier([group(16, 32, 64), group(16, 48)], 64) == 16
    assert asked == sorted(asked, reverse=True) and len(asked) > 4


def test_what_a_hit_removes():
    cache, ann = published()
    hit, miss = (cache.lookup(ann, "x", tokens).lengths.recompute for tokens in (TOKENS, [1] * 50))
    cache.start(ann, "B", TOKENS)
    rows = cache.apply({"op": "append", "request": "B"}).parts[0].useful_new_rows
    assert {"repeated_prefill": hit < 50, "decode_of_later_tokens": rows < 1, "prefill_on_miss": miss < 50} \
        == GOLDEN["L6.benefit_scope"]


def test_three_controls_do_not_stand_in_for_each_other():
    controls = dict.fromkeys(GOLDEN["L6.controls.three"])
    cache, _ = published(hash_name="crc32")
    controls["digest_collision_resistance"] = HASHES["crc32"].gives_up != HASHES["sha256"].gives_up == ""
    controls["cache_salt_trust_group_separation"] = not cache.lookup(asker(cache_salt="s"), "x", TOKENS).lengths.indexed
    with pytest.raises(Rejected, match="unauthorized_namespace"):
        cache.apply({"op": "gate", "do": {"op": "authorize", "principal": "bob", "namespace": "prod/a"}})
    controls["authorization_of_namespace"] = True
    assert all(controls.values()) and len(controls) == 3


def test_the_default_hash_is_the_pinned_designs_and_the_same_in_every_process():
    ours = index().hashed
    assert ours.make(b"x") == hashlib.new(GOLDEN["L6.vllm.default_hash"].replace("-", ""), b"x").digest()
    code = "from kvlab.reuse.chain import block_keys; print(block_keys(range(16), 16)[0].hex())"
    runs = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
                           env={"PYTHONHASHSEED": seed}).stdout for seed in "12"}
    root = hashlib.sha256(b"kvlab/prefix-chain/1").digest()
    packed = b"".join(i.to_bytes(4, "little") for i in range(16))
    assert runs == {hashlib.sha256(root + packed).hexdigest() + "\n"}


def test_the_pinned_design_offers_a_deterministic_serialisation():
    option = GOLDEN["L6.vllm.cbor_option"].lower()
    source = (Path(require("vllm")) / "vllm" / "utils" / "hashing.py").read_text()
    assert f"sha256_{option}" in source
