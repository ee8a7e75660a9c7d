# %% [markdown]
# # Lesson 2 · May I reuse these bytes?
#
# **Same tokens, so same K and V?**
#
# Anna and Ben each have an adapter of their own on one base model. Anna asks first. Then Ben sends the very same
# prompt. Its K and V rows are still in memory. Do you compute them again, or do you hand them to Ben?
#
# You will hand them over, on a real model, and read what Ben gets. Then you meet the contract that would have said
# no, watch it check field by field, and try to fool it. You need no GPU and no download.

# %%
import torch
from IPython.display import display

from kvlab.contract import Rejected
from kvlab.execution.adapters import seeded_adapter, with_adapter
from kvlab.execution.model import load_model
from kvlab.reuse.compatibility import EQUALITY, examine
from kvlab.reuse.identity import IdentityGate
from kvlab.reuse.keys import KeyInputs, block_hashes
from kvlab.reuse.manifests import PROVENANCE
from kvlab.study import fixtures, lesson
from kvlab.study.gate_walk import played, walk
from kvlab.study.lesson import Comparison, Question, Stills, Table
from kvlab.study.lesson_identity import Records, SharedCache, rows
from kvlab.views.stage import widget

torch.set_num_threads(1)  # so small a model runs best on one thread
device = "cuda" if torch.cuda.is_available() else "cpu"
model, tokenizer = load_model("austen", device=device)  # small, and in this repository

anna, ben = (seeded_adapter(model, seed=seed, rank=4, scale=0.4) for seed in (5, 1))
VOICES = {"base": model, "Anna": with_adapter(model, anna), "Ben": with_adapter(model, ben)}

PROMPT = ("The two young ladies were walking in the garden before dinner, "
          "when they saw a gentleman coming up the road; and it was")
TOKENS = tokenizer.encode(PROMPT)
COVERED = TOKENS[:32]
print(len(TOKENS), "tokens, of which", len(COVERED), "fill two blocks of 16")

# %% [markdown]
# An adapter adds a low-rank delta to the projections that make queries, keys and values. These two come from seeds:
# they were not trained, but what they do to the rows is real.
#
# ## The naive answer: same tokens, same rows
#
# First each of them alone.

# %%
anna_alone = SharedCache(VOICES, tokenizer).answer("A", "Anna", PROMPT, 14)
ben_alone = SharedCache(VOICES, tokenizer).answer("B", "Ben", PROMPT, 14)
print("Anna:", "…" + PROMPT[-10:] + anna_alone)
print("Ben: ", "…" + PROMPT[-10:] + ben_alone)

# %% [markdown]
# Now one cache for both. Anna asks first. Ben's prompt has the same tokens, so he takes her two full blocks, and only
# the last 7 tokens are computed under *his* adapter.

# %%
shared = SharedCache(VOICES, tokenizer)
shared.answer("A", "Anna", PROMPT, 14)
ben_shared = shared.answer("B", "Ben", PROMPT, 14, reuse="A")
Comparison(Ben_alone=ben_alone, Ben_after_Anna=ben_shared)

# %% [markdown]
# **Ben pays for his adapter and gets Anna's answer.** Word for word, without an error. These are the rows he was given,
# and the rows that he should have had:

# %%
ours, theirs = rows(VOICES["Anna"], COVERED), rows(VOICES["Ben"], COVERED)
apart = (ours - theirs).flatten(3).norm(dim=-1) / theirs.flatten(3).norm(dim=-1)
Table(["layer", "key rows that differ", "value rows that differ", "distance of a key row, % of its length"],
      [[layer, int((apart[0, layer] > 0.01).sum()), int((apart[1, layer] > 0.01).sum()),
        10 * round(10 * float(apart[0, layer].mean()))] for layer in range(model.config.layers)])

# %% [markdown]
# ## Four more ways to be wrong
#
# No adapter now: base model, same tokens, same number of bytes. Only one thing about the rows is wrong each time. They
# are planted in the cache, and the next chat with the same prompt finds them.

# %%
right = rows(model, COVERED)


def other_axis_order(x):
    """The same bytes, read as [heads, tokens] where they were written as [tokens, heads]."""
    pair, layers, tokens, heads, lanes = x.shape
    return x.reshape(pair, layers, heads, tokens, lanes).transpose(2, 3)


PLANTED = {
    "the right rows": right,
    "computed 16 positions further on": rows(model, COVERED, first=16),
    "the heads of another tensor-parallel rank": right.flip(3),
    "FP16 bytes, read as BF16": right.half().view(torch.bfloat16).to(right.dtype),
    "the axes in another order": other_axis_order(right),
}

said = []
for name, planted in PLANTED.items():
    cache = SharedCache(VOICES, tokenizer)
    cache.answer("A", "base", PROMPT, 1)
    cache.plant("A", planted)
    said.append([name, "…it was" + cache.answer("B", "base", PROMPT, 12, reuse="A")])
Table(["the cache holds", "and the next chat says"], said)

# %% [markdown]
# Nothing crashed, and some of it reads well. Shapes agree, byte counts agree, tokens agree. **So what must agree before
# old bytes may be read again?**
#
# ## The contract: five records, five writers
#
# | Record | Written by | Answers |
# |---|---|---|
# | logical cache ABI | the model's owner | what does a row mean? |
# | layout | the allocator's owner | how are its bytes addressed? |
# | compatibility manifest | whoever publishes the rows | may they be reused? |
# | concrete prefix key | the index | which candidate should I look at? |
# | isolation namespace | the deployment | who may even look? |
#
# Each is frozen, and named by a SHA-256 of its content. Here are those of our model, and Anna's manifest:

# %%
records = Records(model, shared)
rank1 = records.other("rank 1", tp_rank=1)
bf16 = records.other("bf16", storage_dtype="BF16")
gate = records.gate(rank1, bf16, members=("anna", "ben"))

her_rows = records.manifest(COVERED, "A", adapter_identity=anna.identity)
for name, digest in {"cache ABI": records.abi.digest, "layout": records.layout.digest,
                     "positions": records.positions.digest, "Anna's adapter": anna.identity,
                     "Ben's adapter": ben.identity, "Anna's manifest": her_rows.digest}.items():
    print(f"{name:<16}{digest[:12]}")

# %% [markdown]
# The adapter is named by its content. A *name* such as `style-a` can be bound to new weights tomorrow; a digest cannot.
#
# Anna's rows are published. Then Ben asks again, through the gate. He works in her namespace here, so that he may look.

# %%
anna_may, ben_may = (gate.authorize(who, records.space.name) for who in ("anna", "ben"))
published = gate.publish(anna_may, "g0/1003@1", "g0", her_rows)
his_wish = records.manifest(COVERED, "B", adapter_identity=ben.identity)
before = gate.digest
try:
    gate.lookup(ben_may, "g0", his_wish)
except Rejected as no:
    print("refused:", no.reason)
    print("        ", no.meaning)
    print("        ", no.detail)

print("nothing changed:", gate.digest == before)
print("so Ben computes his own rows:", SharedCache(VOICES, tokenizer).answer("B", "Ben", PROMPT, 14))

# %% [markdown]
# **The key said hit, the manifest said no.** An index has one short key a prefix. It made a candidate; it proves
# nothing. Watch the gate at work. **Step with → and ←, play with space.** Dashed means not compared yet.

# %%
SPACE = records.space.name
refused = played(walk(gate.snapshot(), principal="ben", namespace=SPACE, record="g0/1003@1",
                      change={"adapter_identity": ben.identity}), "Anna's rows for Ben?")
display(widget(refused))

# %%
Stills(refused.frames[-1])

# %%
print(refused.frames[-1].text())

# %% [markdown]
# Two questions come *before* the twelve comparisons: may this caller look at all, and which candidate does the key
# name? Then the first difference ends it. The order is fixed, so a refusal always has one name.
#
# ## Predict
#
# Anna's rows are published. Here are eleven consumers. Each differs from her manifest in one thing.

# %%
longer = (*COVERED, *TOKENS[32:])
shifted = records.positions.__class__("rope", records.positions.theta, records.positions.pairing, 16)
EDITS = {
    "another request": {"request_id": "another"},
    "another adapter": {"adapter_identity": ben.identity},
    "temperature 0.8 instead of greedy": {"sampling_and_stopping_policy": "temperature 0.8"},
    "the same tokens, 16 positions further on": {"position_contract_sha256": shifted.digest},
    "another tokenizer version, the same ids": {"tokenizer_revision": "2"},
    "wanted on rank 1": {"cache_layout_sha256": rank1.digest},
    "to be read as BF16": {"cache_layout_sha256": bf16.digest},
    "7 more tokens after the covered ones": {"covered_token_ids": longer},
    "token 20 is another one": {"covered_token_ids": (*COVERED[:20], 7, *COVERED[21:])},
    "another chat template, the same ids": {"chat_template_revision": "2"},
    "another salt": {"cache_salt": "Ben's salt"},
}
Table(["", "what differs"], list(enumerate(EDITS, 1)))


# %%
def asked(change):
    return gate.ask({"ask": "compatible", "principal": "anna", "namespace": SPACE, "record": "g0/1003@1",
                     "change": change})


def run_the_gate():
    answers = dict(enumerate(map(asked, EDITS.values()), 1))
    no = [n for n, a in answers.items() if not a["compatible"]]
    both = asked(EDITS["another salt"] | EDITS["wanted on rank 1"])
    return {"refused": no, "key": [n for n in no if answers[n]["candidate"]],
            "checks": len(answers[6]["ran"]), "two": len(both["ran"])}


quiz = lesson.Predictions([
    Question("refused", "Which of the eleven are refused? Type their numbers.",
             "What can change a row that exists decides. What only says who asks, or what comes later, does not."),
    Question("key", "Which of the refused would the key alone have let through?",
             "The key is made of tokens, parents and a few extras. All the rest is only in the manifest."),
    Question("checks", "How many fields are compared until rank 1 is refused?",
             "The ABI first, then the layout, and the rank is part of the layout.", "fields"),
    Question("two", "A consumer on rank 1 that has another salt too: how many fields are compared?",
             "The first difference in order ends it, whatever else differs.", "fields"),
], run_the_gate)
display(quiz)

# %% [markdown]
# Press the button before you read on. What follows gives it away.
#
# ## The reveal

# %%
revealed = [[n, what, a["candidate"], a["reason"] or "may be reused", len(a["ran"])]
            for n, (what, change) in enumerate(EDITS.items(), 1) for a in [asked(change)]]
Table(["", "what differs", "the key finds it", "the manifest says", "fields compared"], revealed)

# %% [markdown]
# Five edits do not matter. Four of the others have *the same key*, and the key is all that a plain index has.
#
# The log of one full comparison shows the order. Below it stand the four fields that are recorded and never compared.
# Forbidding reuse for another temperature would be as wrong as allowing it for another adapter.

# %%
log = examine(her_rows, her_rows, gate.state.layouts).ran
assert list(log) == list(EQUALITY)
print("compared, in order:", *[f"{n:>2} {name}" for n, name in enumerate(log, 1)], sep="\n  ")
print("recorded only:     ", ", ".join(PROVENANCE))

# %% [markdown]
# **What an engine does, and what we demand.** Two different things, side by side.
#
# | | vLLM v0.23.0 (observed in its source) | kvlab (the contract) |
# |---|---|---|
# | Key | parent's hash, the block's tokens, extras; the group is added | the same |
# | Extras | adapter *name*, picture and offset, salt in block 0, prompt embeddings | the same |
# | Weights, layout, rank, dtype, positions | one process has one of each | in the manifest, compared |
# | Another tenant | a salt separates keys | authorised before anything is looked up |
# | New weights | `reset_prefix_cache` | a successor namespace; old owners are served to the end |
#
# ## What the key sees, and what it does not
#
# A salt stands in block 0 only, yet it changes every key. A picture changes the keys from the block it reaches into. An
# adapter loaded again under its old *name* changes none.

# %%
picture, another = ({"kind": "multimodal", "start": 20, "length": 8, "identity": name} for name in ("x", "y"))
tokens = {"tokens": TOKENS * 2, "block_size": 16}


def changed_by(one, other):
    said = gate.ask({"ask": "key_difference", "one": tokens | one, "other": tokens | other})
    return said["changed_hashes"]


Table(["what differs", "keys that differ, of the blocks 0 to 3"],
      [["the salt", changed_by({"cache_salt": "s"}, {"cache_salt": "t"})],
       ["a picture behind tokens 20 to 27", changed_by({"side_inputs": [picture]}, {"side_inputs": [another]})],
       ["the adapter's name", changed_by({"adapter_name": "anna"}, {"adapter_name": "ben"})],
       ["the adapter's weights, under the same name", changed_by({"adapter_name": "a"}, {"adapter_name": "a"})]])

# %% [markdown]
# The last row is a bug that really happened (vLLM issue 42125). So is a hash that collides (advisory GHSA-rm76). Here
# is one that collides *all the time*: the sum of the tokens, modulo 7. Behind a manifest it costs a comparison, and
# never an answer.

# %%
weak = IdentityGate("sum_mod_7")
weak.load(gate.snapshot() | {"hash": "sum_mod_7", "records": {}})
swapped = (COVERED[1], COVERED[0], *COVERED[2:])  # other prompt, same sum
may = weak.authorize("anna", SPACE)
weak.publish(may, "g0/1003@1", "g0", her_rows)
wish = records.manifest(swapped, "c", adapter_identity=anna.identity)
print("same SHA-256 key:", block_hashes(COVERED, 16)[-1] == block_hashes(list(swapped), 16)[-1])
print("same weak key:   ", block_hashes(COVERED, 16, KeyInputs(), "sum_mod_7")[-1]
      == block_hashes(list(swapped), 16, KeyInputs(), "sum_mod_7")[-1])
try:
    weak.lookup(may, "g0", wish)
except Rejected as no:
    print("refused:         ", no.detail)

# %% [markdown]
# ## The other tenant
#
# Mallory is no member of Anna's namespace. She cannot read a byte. But suppose the cache looks *first* and asks for
# permission *afterwards*:

# %%
index = {str(key): handle for (space, key), handles in gate.state.index.items() for handle in handles}


def look_then_ask(tokens):
    """A cache that finds the entry, and only then asks whether it may be given away."""
    key = block_hashes(tokens, 16, KeyInputs(cache_salt=records.space.cache_salt))[-1]
    return "forbidden" if f"{key}|g0" in index else "no such entry"


for text in (PROMPT, PROMPT.replace("gentleman", "carriage")):
    print(f"{text[65:95]!r:<34} {look_then_ask(tokenizer.encode(text)[:32])}")

# %% [markdown]
# **"Forbidden" has told her that somebody asked exactly this.** She can try one prompt after another. The gate asks for
# permission first, and says the same to every guess. Its index was not read, and no counter moved.

# %%
moved = dict(gate.telemetry.counters)
for text in (PROMPT, PROMPT.replace("gentleman", "carriage")):
    guess = records.manifest(tokenizer.encode(text)[:32], "m")
    for op in ({"op": "authorize", "principal": "mallory", "namespace": SPACE},
               {"op": "lookup", "principal": "mallory", "namespace": SPACE, "group": "g0", "consumer": guess}):
        try:
            gate.apply(op)
        except Rejected as no:
            print(f"{op['op']:<10}{no.reason}")
print("counters moved:", gate.telemetry.counters != moved)

# %% [markdown]
# **Does it take longer?** If a hit takes another time than a miss, even a polite refusal tells. Set the switch to
# `True`, run the cell. Its numbers depend on your machine, so they are neither stored nor compared.

# %% tags=["nbval-ignore-output"]
MEASURE = False

if MEASURE:
    from contextlib import suppress
    from statistics import median
    from time import perf_counter_ns

    def took(work):
        times = []
        for _ in range(300):
            start = perf_counter_ns()
            with suppress(Rejected):
                work()
            times.append(perf_counter_ns() - start)
        return f"{median(times) / 1000:,.1f} µs"

    hit, miss = (records.manifest(t, "c", adapter_identity=anna.identity) for t in (COVERED, swapped))
    ask = {"op": "lookup", "namespace": SPACE, "group": "g0"}
    display(Table(["", "the entry exists", "it does not"], [
        [who, *(took(lambda m=m, p=p: gate.apply(ask | {"principal": p, "consumer": m})) for m in (hit, miss))]
        for who, p in (("Anna, authorised", "anna"), ("Mallory, refused first", "mallory"))]))
    if "c" in gate.state.held:
        gate.release("c")

# %% [markdown]
# ## New weights: a successor, never a new label
#
# Tonight the model gets new weights. Clara is reading Anna's rows at that moment. You may not relabel the old rows, and
# you may not pull them away from under Clara. So the old generation ends in six steps:

# %%
gate.lookup(anna_may, "g0", records.manifest(COVERED, "Clara", adapter_identity=anna.identity))
tonight = records.other("rank 0, tonight", model_generation=VOICES["Ben"].digest)
rotated = gate.apply({"op": "successor", "namespace": SPACE, "layouts": [tonight]})
for n, step in enumerate(rotated.steps, 1):
    print(n, step.replace("_", " "))

holds = gate.ask({"ask": "serve", "request": "Clara", "record": "g0/1003@1"})
print("Clara still reads:", holds["handle"], "under", holds["manifest"][:12], "of generation", holds["generation"])

# %% [markdown]
# Five steps, not six: Clara and Anna still hold the rows. A new request finds nothing old, and nobody may write a new
# label on the old rows:

# %%
new = {"cache_layout_sha256": tonight.digest, "model_generation": tonight.model_generation,
       "namespace_generation": 2, "publication_generation": 2, "adapter_identity": anna.identity}
try:
    gate.lookup(anna_may, "g0", records.manifest(COVERED, "D", **new))
except Rejected as no:
    print("with yesterday's permission:", no.reason)

anna_may = gate.authorize("anna", SPACE)
print("a new request:              ", gate.lookup(anna_may, "g0", records.manifest(COVERED, "D", **new)).outcome)
try:
    gate.publish(anna_may, "g0/1003@1", "g0", records.manifest(COVERED, "A", **new))
except Rejected as no:
    print("a new label on old rows:    ", no.reason)

for who in ("A", "Clara"):
    left = gate.release(who)
    print(f"{who} leaves:".ljust(28), ", ".join(left.steps) or "nothing more happens", *left.reclaimed)
gate.check()

# %% [markdown]
# ## Failure lab
#
# Pick something forbidden. It is tried on a fresh machine, now. Look at the reason, and at the two digests.

# %%
trace = fixtures.load_fixture(fixtures.FIXTURES / "loop2_identity.json")
lab = lesson.FailureLab(trace)
display(lab)

# %%
everything = lesson.refusals(trace)
unchanged = sum(row[-1] == "= unchanged" for row in everything.rows)
print(f"{unchanged} of {len(everything.rows)} refused, digest unchanged")
display(everything)

# %% [markdown]
# Eight of these mistakes were made in public, by good engineers. `fixtures/incidents_identity.json` replays them, each
# with its issue number, and the right behaviour beside it:

# %%
incidents = fixtures.load_fixture(fixtures.FIXTURES / "incidents_identity.json")
verdicts = fixtures.check_fixture(incidents)["golden"]
names = list(dict.fromkeys(v.id for v in verdicts))
Table(["what happened in public", "values that hold here"],
      [[name, f"{sum(v.held for v in verdicts if v.id == name)} of {sum(v.id == name for v in verdicts)}"]
       for name in names])

# %% [markdown]
# **With a larger model.** SmolLM2-135M writes better English. Get it once with `python -m kvlab get-model`, set the
# switch to `True`, run the cell. Its output is not stored and not compared.

# %%
WITH_SMOLLM2 = False

if WITH_SMOLLM2:
    torch.set_num_threads(4)
    large, words = load_model("smollm2", device=device)
    two = {name: with_adapter(large, seeded_adapter(large, seed=seed, scale=0.2)) for name, seed in
           (("Anna", 0), ("Ben", 2))}
    question = ("On a rainy Sunday in a small town by the sea there is, as everybody who has ever lived there knows, "
                "only one thing to do, and that one thing is to")
    cache = SharedCache(two, words)
    print("Anna:          ", cache.answer("A", "Anna", question, 12))
    print("Ben, alone:    ", cache.answer("B", "Ben", question, 12))
    print("Ben, on hers:  ", cache.answer("C", "Ben", question, 12, reuse="A"))

# %% [markdown]
# ## What you take with you
#
# - Equal tokens are one of eleven facts. Equal bytes are none of them.
# - A key narrows, a manifest decides. Authorisation comes before both.
# - What is published keeps its meaning. A change makes a successor, and old owners are served to the end.
#
# **Try it.** Give Anna's adapter `targets=("q",)`: her keys and values in layer 0 are then the base model's. May Ben
# reuse that layer? Change a field of your choice in the app, on the page *May I reuse these bytes?*, and name the check
# before you look.
#
# **The next question.** You know now *whether* rows may be reused. How many bytes are they, and who uses them? Lesson 3
# counts. And the index behind the key, the one that finds the *longest* match, is lesson 6.
