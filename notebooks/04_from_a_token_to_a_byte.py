# %% [markdown]
# # Lesson 4 · From a token to a byte
#
# **Block 7: where is that?**
#
# A block table says that a token lies in block 7. A kernel needs a place in memory. Between the two lie a group, a
# slot, a layer, K or V, a head, a lane, a dtype and a base. How much of that can you leave out?
#
# You will leave it out on a real model and read what it says then. Then you follow one number through every step, and
# read its bytes from this very process. Run the cells from the top. You need no GPU and no download.

# %%
import random
from dataclasses import replace
from itertools import permutations

import torch
from IPython.display import display

from kvlab.contract import Rejected
from kvlab.execution.model import load_model
from kvlab.memory.address import STEPS, follow, resolve
from kvlab.memory.address_bytes import address_snapshot, lay_out, read_scalar
from kvlab.memory.address_map import AddressMap
from kvlab.memory.address_records import read_snapshot
from kvlab.memory.address_sources import rebased, relaid, successors
from kvlab.memory.address_tables import kernel_block_table, slot_mapping, writes_of
from kvlab.memory.layout import AXES, INNER_LANE, KV_KIND
from kvlab.study import fixtures, lesson
from kvlab.study.lesson import Comparison, PagedWorld, Question, Stills, Table
from kvlab.study.lesson_address import Follower, followed, heads_before_tokens, misread, slot_id_as_offset
from kvlab.views.stage import widget

torch.set_num_threads(1)  # so small a model runs best on one thread
model, tokenizer = load_model("austen")  # on the CPU, whose memory this process may read

# %% [markdown]
# ## Naive answer: the slot id is the place
#
# An engine hands its kernels a **slot id** for each token: `slot * block_size + row`. It counts token rows, so it looks
# like an offset. Use it as one: take row `slot id` from the start of the tensor. Rows are still written where they
# belong. Only the reader errs.

# %%
PROMPT = "Emma was not quite"


def chat(prompt, gathers=None, tokens=12, before=""):
    """One chat on a new memory, perhaps read wrongly. `before` is an earlier guest's text in the same memory."""
    world = PagedWorld(model, tokenizer, num_blocks=7)
    if before:
        world.allocator.observers.remove(world.store.poison)  # a real pool keeps what was freed
        world.read("Z", before)
        world.leave("Z")
    misread(world, gathers or {})
    world.read("A", prompt)
    world.speak("A", tokens=tokens)
    return world.reply("A")


right = chat(PROMPT)
wrong = chat(PROMPT, {0: slot_id_as_offset})
Comparison(right=PROMPT + right, slot_id_as_place=PROMPT + wrong)

# %% [markdown]
# **No error, no NaN, no odd number.** Each read returned a real row of this very chat: that of the group's *first*
# layer. The slot id knows no layer, so layers 1 and 2 of the group got layer 0's rows. The model goes on fluently, and
# says something else.
#
# ## Naive answer 2: the right tensor, the other axis order
#
# Many kernels want a block as all tokens of head 0, then all tokens of head 1. Others want token rows with all heads.
# Same shape, same bytes, same addresses in bounds. Let the last layer's kernel assume the wrong one. The pool has
# served somebody before, as every pool has.

# %%
GUEST = ("Elizabeth was much too embarrassed to say a word. After a short pause, her companion added, You are too "
         "generous to trifle with me. If your feelings are still what they were last April, tell me so at once. "
         "My affections and wishes are unchanged, but one word from you will silence me on this subject for ever.")
DARCY = "Mr. Darcy looked"
Comparison(right=DARCY + chat(DARCY), other_strides=DARCY + chat(DARCY, {1: heads_before_tokens}, before=GUEST))

# %% [markdown]
# One layer of four reads wrongly, and part of what it reads is **the earlier guest's**. Nothing in the numbers tells.
# An address that is wrong by a stride is still an address.
#
# ## The contract
#
# A complete read names all of this (article, section 0x03):
#
# | you ask with a logical coordinate | memory has a physical one |
# |---|---|
# | which request, *at which table version* | which cache group |
# | token position | which pool, *of which generation* |
# | model layer | which block, on which slot, which row of it |
# | K or V | which tensor, from which base |
# | head, lane | which head, which lane |
#
# A block's number is a **name**. It is scoped: group, pool, generation, number. A descriptor says on which slot the
# block stands and how many rows are written. Then the declared axis order turns indices into strides, and strides into
# bytes. Here is the order in which kvlab's translator works and refuses. Whatever fails first is the answer.

# %%
article = read_snapshot(fixtures.load_fixture(fixtures.FIXTURES / "loop4_addresses.json")["base"])
trace = resolve(article, "A", 16, 24, "K", 1, 5)
assert trace.checks == tuple(name for name, _ in STEPS)
found = {"unique_group_for_layer": "group_id", "layer_local": "layer_local", "table_bounds": "physical_ref",
         "logical_block_and_offset": "logical_block", "slot_id": "slot_id",
         "physical_identity(pool,generation,block)": "physical_slot", "offset<valid_rows": "valid_rows",
         "element_offset": "element_offset", "address_in_[base,end)": "byte_address"}
rows = []
for n, name in enumerate(trace.checks, 1):
    value = getattr(trace, found[name]) if name in found else ""
    rows.append([n, name, f"block {value.physical_block_id}" if name == "table_bounds" else value])
Table(["step", "check", "finds"], rows)

# %% [markdown]
# **What an engine does, and what we demand.** vLLM v0.23.0 (observed in its source) keeps one block table and one slot
# mapping per cache group, each with its own block size, and computes `slot * block_size + offset`. Its tables carry
# bare numbers: that they are fresh follows from the order of events. kvlab (the contract) lets no number in without
# its pool, its generation and the reader's version, and checks the address against the tensor's two ends.
#
# ## Slow motion
#
# The article's model: 32 layers in two groups, `g0` with layers 0 to 23, `g1` with 24 to 31. Request A has 33 tokens.
# Where is K of token 16, layer 24, head 1, lane 5?

# %%
story = followed(article, trace)
slot_frame = next(n for n, f in enumerate(story.frames) if "slot id" in f.title)
Stills(story.frame(slot_frame), story.frame(len(story.frames) - 1))

# %% [markdown]
# Above, the slot id is known, and still nothing says which byte. Below, the way is complete. The same here, to step
# through. **→ and ←, or space.** Choose another token, layer, head or lane, also a forbidden one.

# %%
panel = Follower(article, "A", token=16, layer=24, head=1, lane=5)
display(panel)

# %% [markdown]
# In words, the last frame says:

# %%
print(story.frames[-1].text())

# %% [markdown]
# ## The same in this process
#
# The article's numbers are examples. Now real ones. A chat lies in real tensors. The allocator says which
# block is whose, the tensors say where they begin. That is all the translator needs.

# %%
STORY = ("The two young ladies were walking in the garden before dinner, "
         "when they saw a gentleman coming up the road; and it was Mr. Darcy. He")
world = PagedWorld(model, tokenizer, num_blocks=6)
length = world.read("A", STORY)
snapshot = address_snapshot(world.store, world.allocator.snapshot())
words = [tokenizer.decode([t]) for t in tokenizer.encode(STORY)]

here = resolve(snapshot, "A", 33, 3, "V", 1, 7)
print(f"{length} tokens. Token 33 is {words[33]!r}, in block {here.physical_ref.physical_block_id} "
      f"of generation {here.physical_ref.block_generation}, on slot {here.physical_slot}")
print(f"slot id {here.slot_id}, element {here.element_offset:,}, byte {here.byte_offset:,} from the base")

# %% [markdown]
# The address itself differs in every run, so it is not printed. But you may read it. `ctypes` takes four bytes from
# this process's memory, without torch. Are they the scalar that the tensor shows at that place?

# %%
raw = read_scalar(here, torch.float32)
_, keys, values = world.store.layers[3]
shown = values[here.physical_slot, here.token_offset, 1, 7]
print(f"read from memory {raw:.6f}, in the tensor {shown:.6f}, equal: {bool(raw == shown)}")
print("at the slot id instead: ", f"{world.store.v[1].flatten()[here.slot_id]:.6f}", "(a real number, another one)")

# %% [markdown]
# One scalar may be luck. Take **every scalar of one random token**: all layers, K and V, all heads, all lanes.

# %%
dice = random.Random(4)
token = dice.randrange(length)
c, checked = model.config, []
for layer in range(c.layers):
    _, keys, values = world.store.layers[layer]
    for kind, tensor in (("K", keys), ("V", values)):
        for head in range(c.kv_heads):
            for lane in range(c.head_dim):
                t = resolve(snapshot, "A", token, layer, kind, head, lane)
                real = tensor[t.physical_slot, t.token_offset, head, lane]
                checked.append(bool(read_scalar(t, torch.float32) == real))
print(f"token {token} ({words[token]!r}): {sum(checked)} of {len(checked)} scalars equal")

# %% [markdown]
# ## The row is there, and it is not hers
#
# Ben branches from the chat and goes back to token 25: he sees tokens 0 to 24. His second block is the same body as
# Anna's, and it is **full**: 16 written rows, of which he may see 9. He asks for token 25.

# %%
world.branch("A", "B")
world.allocator.truncate("B", 25)
both = address_snapshot(world.store, world.allocator.snapshot())
seen = AddressMap(both).ask({"ask": "visibility", "request": "B"})
print("Ben's second block: ", {k: seen["g1"][1][k] for k in ("visible", "valid")})

asked = follow(both, "B", 25, 3, "V", 0, 0)
print("refused:            ", asked.refused)
hers = resolve(both, "A", 25, 3, "V", 0, 0)
print("what lies there:    ", repr(words[25]), "of Anna's, finite:", bool(read_scalar(hers, torch.float32).isfinite()))
still = followed(replace(both, groups=tuple(rebased(g, 0) for g in both.groups)), asked)
Stills(still.frames[-1])

# %% [markdown]
# Had the translator asked only *is this row written?*, the answer was yes, and Anna's word would have entered Ben's
# attention. **May you see it** and **is it there** are two checks, in this order. The reverse can fail, too: a worker
# that believes in one token more than was committed reads a row that nobody wrote.

# %%
early = replace(both.requests["A"], context_length=length + 1)
print("a worker that is one token ahead:", follow(both, early, length, 3, "V", 0, 0).refused)

# %% [markdown]
# ## Any layout, the same scalar
#
# The five axes can lie in 120 orders. K and V may share a tensor (one more axis), and a head may be packed in vectors
# of x lanes, as vLLM's K cache is: `[.., head_size/x, block_size, x]`. Lay the same rows out in each of them, for real,
# and read the same scalar from each.

# %%
rows = world.store.k[0], world.store.v[0]
group, lane = both.groups[0], 21
wanted = rows[0][2, resolve(both, "A", 20, 2, "K", 1, lane).physical_slot, 4, 1, lane]


def scalar_in(order, x=1):
    """Lay the group out in this order, translate, read. Returns the trace and whether the scalar is the right one."""
    laid, tensors = lay_out(relaid(group, order, x), *rows)
    t = resolve(replace(both, groups=(laid, both.groups[1])), "A", 20, 2, "K", 1, lane)
    equal = bool(read_scalar(t, torch.float32) == wanted)
    del tensors  # not before it was read
    return t, equal


every = [scalar_in(order) for order in permutations(AXES)]
print(f"{len(every)} orders: right scalar in {sum(equal for _, equal in every)}, "
      f"{len({t.byte_offset for t, _ in every})} different byte offsets")

# %%
L, S, T, H, D = AXES
layouts = {
    "layer first": (L, S, T, H, D), "block first": (S, L, T, H, D), "heads before tokens": (L, S, H, T, D),
    "K and V in one tensor": (L, KV_KIND, S, T, H, D), "K beside V in each block": (S, KV_KIND, L, T, H, D),
    "packed, 4 lanes": (L, S, H, D, T, INNER_LANE),
}
shown = []
for name, order in layouts.items():
    t, equal = scalar_in(order, 4 if INNER_LANE in order else 1)
    shown.append([name, " ".join(f"{n}" for n in t.strides.values()), t.slot_id, t.byte_offset, equal])
Table(["layout", "strides", "slot id", "byte offset", "right scalar"], shown)

# %% [markdown]
# Only strides and bytes change. Request, table, block, slot id: all the same. So nothing about a slot id or a block
# table tells you the layout, and the layout must be declared. The packed one as a picture. (Its base is put at 0 here,
# so that the picture is the same in every run.)

# %%
packed = relaid(group, layouts["packed, 4 lanes"], 4)
flat = replace(both, groups=(packed, rebased(both.groups[1], packed.end["V"])))
last = followed(flat, resolve(flat, "A", 20, 2, "K", 1, lane))
Stills(last.frames[-1])

# %% [markdown]
# ## Predict
#
# The article's model again: blocks of 16 tokens, slots as above (block 2001 on slot 6), FP16. `g1` has the axes layer,
# slot, token, head, lane, with strides 65,536, 8,192, 512, 128, 1. The machine runs when you press the button.

# %%
GROWN = next(s["op"] for s in fixtures.load_fixture(fixtures.FIXTURES / "loop4_addresses.json")["trace"]
             if s["name"] == "adopt C 17")


def run_the_machine():
    def at(token, head=0, lane=0, layer=24):
        return resolve(article, "B", token, layer, "K", head, lane)

    grown = AddressMap(article)
    grown.apply(GROWN)
    return {"slot": at(24).slot_id, "token": at(24).byte_offset - at(23).byte_offset,
            "layer": at(24, layer=25).byte_offset - at(24).byte_offset,
            "offset": at(24).byte_offset,
            "legal": [t for t in (23, 24, 25, 26, 31) if not follow(article, "B", t, 24, "K", 0, 0).refused],
            "grown": resolve(grown.state, "C", 16, 24, "K", 0, 0).slot_id}


quiz = lesson.Predictions([
    Question("slot", "B's token 24 lies in block 2001. What is its slot id in g1?",
             "Slot 6 times 16, and row 8 of the block."),
    Question("token", "How many bytes are there from a token to the next one of the same block, same head and lane?",
             "The token's stride in elements, times two bytes.", "bytes"),
    Question("layer", "And from a layer to the next one, same token?",
             "A layer's stride covers all slots of the pool.", "bytes"),
    Question("offset", "How many bytes from the base of K is token 24's first scalar, layer 24, head 0?",
             "Slot times its stride, plus row times its stride, times two.", "bytes"),
    Question("legal", "B sees 25 tokens. Which of tokens 23, 24, 25, 26, 31 may it read?",
             "Visible is what is below 25, however full the block is.", "tokens"),
    Question("grown", "C had 16 tokens. Its successor puts token 16 into block 2003 on slot 4. Which slot id is that?",
             "The token opens a block, so it is row 0 of slot 4."),
], run_the_machine)
display(quiz)

# %% [markdown]
# Press the button before you read on. What follows gives it away.
#
# ## The reveal

# %%
for name, value in run_the_machine().items():
    print(f"{name:<8}", *(value if isinstance(value, list) else [f"{value:,}"]))

# %% [markdown]
# ## A table grows: consume the successor
#
# This contract never allocates. When C crosses token 16, the allocator (lesson 5) publishes a successor, and the map
# adopts it: **version, mapping and valid rows at once**. A successor with the wrong version, or one that changes an
# entry it did not declare, is refused.

# %%
machine = AddressMap(article)
print("before:  ", follow(machine.state, "C", 16, 24, "K", 0, 0).refused)
receipt = machine.apply(GROWN)
print("adopted: ", ", ".join(receipt.moved), "-> version", receipt.table_version)
after = [resolve(machine.state, "C", 16, layer, "K", 0, 0) for layer in (0, 24)]
print("after:   ", {t.group_id: (t.physical_ref.physical_block_id, t.slot_id) for t in after})
try:
    machine.apply(GROWN)
except Rejected as no:
    print("again:   ", no.reason)

# %% [markdown]
# And with the real allocator? Let the map follow it through a branch, a copy on write and a release. A worker keeps
# the snapshot that it took at the start. Then its block goes to somebody else.

# %%
live = AddressMap(address_snapshot(world.store, world.allocator.snapshot()))
yesterday = live.state.requests["B"]


def catch_up():
    """Bring the map to where the allocator is, by successors only."""
    now = address_snapshot(world.store, world.allocator.snapshot())
    for op in successors(live.state, now):
        live.apply(op)
    return live.state.groups == now.groups and live.state.requests == now.requests


steps = []
for what, act in (("Ben says a word", lambda: world.speak("B", tokens=1)),
                  ("Anna leaves", lambda: world.leave("A")),
                  ("Ben leaves", lambda: world.leave("B")),
                  ("Clara arrives", lambda: world.read("C", GUEST[:250]))):
    act()
    agrees = catch_up()
    steps.append([what, agrees, follow(live.state, yesterday, 3, 3, "K", 0, 0).refused or "may read"])
Table(["what happens", "map = allocator", "the worker with yesterday's snapshot, token 3"], steps)

# %% [markdown]
# Ben's rows stay readable while anybody's table names the block. Then the block is nobody's: `unknown_physical_block`.
# Then it is Clara's: same number, other generation. With bare numbers this read would return Clara's rows.
#
# ## What kernels are handed
#
# A kernel gets arrays, not snapshots. Three conversions, each in one place, each with a trap that bit a real engine:

# %%
mapping = slot_mapping(article, {"A": (15, 17), "B": (24, 25)}, pad_to=5)["g1"]
print("slot mapping, padded:    ", mapping)
print("-1 // 16, -1 % 16:       ", divmod(-1, 16), "the last row of the last block, which is somebody's")
print("what a writer writes:    ", writes_of(mapping, 16))
print("block 3 of 8 tokens, for a kernel with blocks of 4:", kernel_block_table([3], 8, 4))

wide = fixtures.load_fixture(fixtures.FIXTURES / "incidents_address.json")
big = resolve(read_snapshot(wide["base"]), "Q", 0, 2, "K", 0, 0)
print(f"page {big.physical_slot:,}: element {big.element_offset:,}, in 32 bits {big.element_offset % 2**32:,}")

# %% [markdown]
# **Why does my server say block size 16 and the kernel 64, or the other way round?** Two sizes have one name. The
# *allocator's* block is what a table gives out; the *kernel's* is what one program reads at a time. A kernel block must
# divide the allocator's: then block `b` is kernel blocks `b * ratio` to `b * ratio + ratio - 1`, and the rows are the
# same rows. Source-observed, vLLM v0.23.0 maps each table so before every step. Take the ids over as they are, and you
# read real rows of other blocks: fluent, and wrong.

# %%
table, rows = [3, 0, 5], range(24)  # three blocks of 8 tokens; a kernel with blocks of 4
right = kernel_block_table(table, 8, 4)
taken = {"mapped": right, "as they are": table * 2}
owned = [table[t // 8] * 8 + t % 8 for t in rows]
for how, blocks in taken.items():
    same = sum(blocks[t // 4] * 4 + t % 4 == row for t, row in zip(rows, owned, strict=True))
    print(f"{how:<12} kernel blocks {blocks}: {same} of 24 rows are the request's own")
try:
    kernel_block_table(table, 8, 16)
except Rejected as no:
    print(f"a kernel block of 16 over blocks of 8: {no.reason}")

# %% [markdown]
# The large page above is a real report (flashinfer 3136): in 32 bits it reads page 1. Here are all of them, each
# replayed on this machine with the smallest input that shows it.

# %%
held = fixtures.check_fixture(wide)
cases = {}
for verdict in held["golden"] + held["negatives"]:
    cases.setdefault(verdict.id, []).append(verdict.held)
Table(["reported in", "statements here", "all hold"], [[k, len(v), all(v)] for k, v in cases.items()])

# %% [markdown]
# ## Failure lab
#
# Pick something forbidden. It is tried on a fresh machine, now. Look at the reason, and at the two digests.

# %%
trials = fixtures.load_fixture(fixtures.FIXTURES / "loop4_addresses.json")
display(lesson.FailureLab(trials))

# %%
everything = lesson.refusals(trials)
print(sum(row[-1] == "= unchanged" for row in everything.rows), "of", len(everything.rows), "refused, digest unchanged")
display(everything)

# %% [markdown]
# ## At work: every layer of the chat, from bytes alone
#
# The last proof. Rebuild **all of Clara's K rows of layer 0** from addresses and raw bytes, without touching the
# tensor, and compare with what attention reads.

# %%
clara = live.state.requests["C"].context_length
rebuilt = torch.tensor([[[read_scalar(resolve(live.state, "C", t, 0, "K", h, d), torch.float32)
                          for d in range(c.head_dim)] for h in range(c.kv_heads)] for t in range(clara)])
print(f"{rebuilt.numel():,} scalars of {clara} tokens, equal:", torch.equal(rebuilt, world.rows("C")[0][0, 0]))

# %%
final = followed(flat, resolve(flat, "B", 7, 1, "V", 0, 3))
display(widget(final, frame=len(final.frames) - 1))
print(final.frames[-1].title)

# %% [markdown]
# ## What you take with you
#
# - A block's number is a name. A slot id is a row. Only base, declared strides and dtype make a byte.
# - First *may you see it*, then *is it in your table*, then *is it still the same block*, then *is the row written*.
# - A layout changes strides and nothing else. A reader holds one version, and a successor moves everything at once.
#
# **Try it.** Put `heads_before_tokens` into both groups. Give `chat` no `before` and see what an unwritten row does.
# Ask the panel for layer 32.
#
# **The next question.** Two chats now share a block, and the table says so. One of them wants to write. This contract
# hands lesson 5 the names: scoped references, versions, and successors that are consumed whole. Who makes them?
