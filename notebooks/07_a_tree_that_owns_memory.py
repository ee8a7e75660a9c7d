# %% [markdown]
# # Lesson 7 · A tree that owns memory
#
# **Is a radix tree just a faster dict?**
#
# Lesson 6 found full blocks by name. A radix tree finds the longest prefix token by token: the same words, then a
# difference, wherever that is. It looks like a dict with a better lookup. So the first bug is to treat it like one.
#
# You will run that bug on a real model and read the damage. Then you meet the contract, watch its 18 operations, and
# predict what they free. Run the cells from the top. You need no GPU and no download.

# %%
from itertools import islice

import torch
from IPython.display import display

from kvlab.contract import Rejected
from kvlab.execution.model import load_model
from kvlab.reuse.radix_cache import RadixCache
from kvlab.study import lesson, lesson_radix
from kvlab.study.lesson import Comparison, Question, Stills, Table
from kvlab.study.lesson_radix import Tried, found_in, on_trace, rows_computed, serve
from kvlab.study.lesson_radix_rows import CarelessBook, RadixBook, SlotWorld, alone
from kvlab.study.trace_texts import MessageTrace
from kvlab.views.stage import widget

torch.set_num_threads(1)  # so small a model runs best on one thread
device = "cuda" if torch.cuda.is_available() else "cpu"
model, tokenizer = load_model("austen", device=device)  # small, and in this repository

STORY = ("The two young ladies were walking in the garden before dinner, "
         "when they saw a gentleman coming up the road; and it was")
ANNA, BEN = STORY + " Mr. Darcy. He", STORY + " her brother, and she cried"
CLARA = ("Poor Miss Bates was ill. Miss Bates was old. "
         "Miss Bates could talk for ever, and Miss Bates")

for name, text in {"story": STORY, "Anna": ANNA, "Ben": BEN, "Clara": CLARA}.items():
    print(f"{name:<6}{len(tokenizer.encode(text)):>3} tokens")

# %% [markdown]
# ## The naive answer: a dict of prefixes
#
# A **slot** holds the K and V rows of one token. The index maps prefixes to slots. Anna's chat runs first and puts its
# slots into the index. Ben's chat begins with the same story, so he takes those slots and computes only his own line.
#
# Then Ben puts *his* chat into the index. The story is there already, so his copy of it is a duplicate. A duplicate is
# freed, of course: `free(slots[:prefix_len])`, all that the index found.

# %%
careless = CarelessBook(slots=192)
world = SlotWorld(model, tokenizer, careless, slots=192)
for chat, text in {"Anna": ANNA, "Ben": BEN}.items():
    found = world.read(chat, text)
    world.publish(chat)
    print(f"{chat}: {found} tokens found, {world.length[chat] - found} computed")

free = set(careless.free)
for chat in ("Anna", "Ben"):
    print(f"{chat}'s table points at {len(free & set(careless.table(chat)))} free slots")

# %% [markdown]
# Ben had no copy. He had **borrowed** Anna's slots, and they were freed under both of them. Nothing fails yet: freed
# rows stay where they are until somebody else takes the slots. Here comes Clara.

# %%
world.read("Clara", CLARA)
taken = set(careless.table("Clara"))
print("Clara writes into", len(taken & set(careless.table("Anna"))), "of Anna's slots")

Comparison(Anna_alone=alone(model, tokenizer, ANNA, 14), Anna_now=world.speak("Anna", 14))

# %%
Comparison(Ben_alone=alone(model, tokenizer, BEN, 14), Ben_now=world.speak("Ben", 14))

# %% [markdown]
# **Both chats continue a story that is no longer there.** Their tokens are the same, their tables are the same, and the
# rows are Clara's. No error, no warning. Anna did nothing at all: a stranger's bookkeeping broke her chat.
#
# ## The contract: one owner for each slot
#
# A radix tree is not a lookup that points at memory. **It owns memory.** Each slot is in exactly one place:
#
# | A slot is | who may free it |
# |---|---|
# | the **tree's** | only an eviction |
# | **private** to a request | that request |
# | **free** | nobody: it waits in the queue |
#
# A request's table *refers* to the tree's slots; it does not own them. The first `protected_len` tokens of a chat are
# such references. So what a publication frees is `slots[protected_len:prefix_len]`: what this chat really computed
# **and** the tree already had. Here is the same run with the real cache.

# %%
book = RadixBook(slots=192)
right = SlotWorld(model, tokenizer, book, slots=192)
for chat, text in {"Anna": ANNA, "Ben": BEN, "Clara": CLARA}.items():
    right.read(chat, text)
    right.publish(chat)

for chat, text in {"Anna": ANNA, "Ben": BEN, "Clara": CLARA}.items():
    print(f"{chat} speaks as if alone:", right.speak(chat, 14) == alone(model, tokenizer, text, 14))
book.cache.check()
print("partition of the slots:", book.cache.ask({"ask": "pool"}))

# %% [markdown]
# ## Is "radix" the same as "prefix cache"?
#
# No. *Prefix caching* is the promise: rows of a common beginning are not computed twice. There are two indexes for it.
#
# | | hash chain (lesson 6) | radix tree (this lesson) |
# |---|---|---|
# | key | a block's hash over everything before it | the tokens themselves, along a path |
# | finds | full blocks of a fixed size | any length at block size 1, else whole blocks |
# | a lookup | changes nothing | may **split** an edge, and notes the use |
# | memory | an allocator owns blocks, the index names them | the tree owns the slots |
# | protection | a reference count on each block | a lock on the whole path |
# | evicted first | a block nobody references, tails first | an unlocked **leaf**, a whole edge |
#
# ## Eighteen operations
#
# This is the article's trace: 24 slots of one token. On top of each slot stands its token, under it its number. Depth
# in tokens goes to the right. First, a match that ends inside an edge:

# %%
trace = on_trace()
recording = trace.recording("Eighteen operations on 24 slots")
titles = [frame.title for frame in recording.frames]
match = next(n for n, title in enumerate(titles) if title.startswith("Match: 3 tokens"))

Stills(recording.frame(match), recording.frame(match + 1))

# %% [markdown]
# **A match changed the tree.** The edge divides where it stands. No row moves, no slot is allocated or freed, and the
# new node is the parent: the old one keeps its number and the rest.
#
# Now all of it. **Step with → and ←, play with space.** Watch where slots come from, and where they go.

# %%
stage = widget(recording, frame=match)
display(stage)

# %% [markdown]
# Every frame is there in words, too. This is the insertion that brought six slots and kept two:

# %%
kept = titles.index("Keep 11, 12, give 7 to 10 back")
print(recording.frame(kept).text())

# %% [markdown]
# ## Locks climb to the root
#
# A running chat must not lose its prefix. A lease puts a lock on **every** node of its path, not only on the leaf. Two
# chats stand on the shared beginning here, so its count is 2:

# %%
locked = titles.index("req-chat-b is running: lock its path")
Stills(recording.frame(locked))

# %%
edges = trace.history.seek(9).committed["nodes"]
Table(["node", "tokens", "stored lock", "leases whose path contains it"],
      [[node, " ".join(map(str, row["tokens"])), row["lock"],
        sum(int(node) in path for path in ([2, 3, 1, 5], [2, 3, 4]))] for node, row in edges.items()])

# %% [markdown]
# ## Predict
#
# Answer before you run the machine. It is run when you press the button, and grades you.

# %%
quiz = lesson.Predictions([Question(**p) for p in lesson_radix.PREDICTIONS], lesson_radix.answers)
display(quiz)

# %% [markdown]
# Press the button before you read on. What follows gives it away.
#
# ## Evictable, protected, lock_ref, leaf-ready: what do they count?
#
# Readers of SGLang ask this again and again (sglang issue 35270, mllm pull request 656). All four are about the slots
# that the **tree** owns:
#
# - `lock_ref` of a node: how many running requests have this node on their path.
# - **protected**: slots of edges with `lock_ref > 0`. **evictable**: slots of edges with `lock_ref == 0`.
# - **leaf-ready**: the part of evictable that is in leaves, so that it may go *now*. The rest goes after its children.

# %%
rows = []
for step in trace.history:
    if step.kind != "committed":
        continue
    cache = RadixCache.of(step.committed)
    ledgers, pool = cache.ask({"ask": "ledgers"}), cache.ask({"ask": "pool"})
    rows.append([step.receipt["version"], step.op["op"], *pool.values(), *ledgers.values()])
    assert pool["tree"] == ledgers["protected"] + ledgers["evictable"]

Table(["version", "operation", "tree", "private", "free", "slots", "protected", "evictable", "leaf-ready"], rows)

# %% [markdown]
# Read version 11: four slots are evictable, two of them leaf-ready. Whoever promises "4 slots can be freed" is right;
# whoever frees them in any order loses the way to their children. Now the three evictions:

# %%
Table(["version", "asked for", "edges that went", "slots freed"],
      [[s.receipt["version"], s.op["tokens"], " then ".join(str(e["tokens"]) for e in s.receipt["evicted"]),
        len(s.receipt["released"])] for s in trace.history if s.receipt and s.op["op"] == "evict"])

# %% [markdown]
# Leaves first, and a parent only when it has become one. Here it is at work: `[60]` goes, then `[50 51]`.

# %%
outside_in = titles.index("Evict 3 tokens: first [60]")
Stills(recording.frame(outside_in), recording.frame(outside_in + 1))

# %% [markdown]
# And an edge goes **whole**. The tree knows no half-evicted edge: its tokens would have no rows.

# %%
greedy = Tried(RadixCache(12))
greedy.do({"op": "insert", "tokens": [70, 71, 72]})
greedy.do({"op": "evict", "tokens": 1})
print(f"asked for 1, freed {len(greedy.last.released)}")

# %% [markdown]
# ## Which one is evicted first?
#
# *Which leaf may go* is the contract. *Which of them goes first* is a policy. There are seven here, the ones that
# SGLang v0.5.11 offers. Five prompts, used unequally; then everything is evicted. In which order do they go?

# %%
Table(["order", "first", "second", "third", "fourth", "last"],
      [[name, *who] for name, who in lesson_radix.orders().items()])

# %% [markdown]
# Dora was never asked for again, so `lru` lets her go first. `fifo` lets Anna go first, who was used most: she came
# first. `mru` looks perverse. It wins where prompts come round and round, and are more than the cache holds.
#
# In a hash chain (lesson 6) the tail blocks of a chat go before its head, because they are released in that order. In
# the tree no rule is needed for that: a head cannot be a leaf while its tail is there.
#
# **What an engine does, and what we demand.** Our own rule notes a use on what was **matched**, and on nothing else.
# SGLang v0.5.11 (observed in its source) touches the edge *before* it splits it, so the half that was not matched looks
# used, too. One workload, two victims:

# %%
both = {policy: lesson_radix.half_used(policy) for policy in lesson_radix.POLICIES}
labels = {"normative": "kvlab (normative)", "sglang-0.5.11": "SGLang v0.5.11 (source-observed)"}
Table(["insert 1 2 3 4, insert 9 9, match 1 2, evict 1", "what goes"],
      [[labels[policy], str(tried.last.evicted[0].to_dict()["tokens"])] for policy, tried in both.items()])

# %% [markdown]
# | | SGLang v0.5.11 (source-observed) | kvlab (normative) |
# |---|---|---|
# | A use is noted on | the whole edge, before its split | the matched part |
# | A split's parent | is new | is as old as its rows |
# | Hits are counted by | insertions | matches and insertions |
# | Versions, digests, receipts | none | one of each an operation |
# | Tree, private, free | no check of the whole partition | one partition, counted again by `check()` |
#
# ## How much must a batch compute?
#
# There is a theorem (SGLang paper). Visit the requests **depth first** and each edge is computed once: no order
# computes fewer rows. It has three assumptions, and the machine checks them: the batch is **fixed and known**, the
# tree is built from **that batch**, and the cache holds **the longest request**.

# %%
PLAYS = ["To be, or not to be", "Once upon a time there was a king", "To be, or not to be: that is the question",
         "Once upon a time there was a queen", "To be, or not to be loved", "Once upon a night"]
batch = [tokenizer.encode(text) for text in PLAYS]
longest = max(map(len, batch))
fixed = {"ask": "bound", "requests": batch, "offline_fixed_batch": True, "tree_from_that_batch": True}
bound = RadixCache(1).ask(fixed | {"capacity": longest})

arrival = list(range(len(batch)))
Table(["order", "slots", "rows computed"],
      [["the bound", "", bound["rows"]],
       ["depth first", longest, rows_computed(batch, bound["order"], longest)],
       ["as they came", longest, rows_computed(batch, arrival, longest)],
       ["as they came", 200, rows_computed(batch, arrival, 200)],
       ["no cache", "", sum(map(len, batch))]])

# %% [markdown]
# Depth first meets the bound with the smallest cache that is allowed. With a large cache any order does. And what if an
# assumption does not hold? Then there is no bound to quote:

# %%
for change in ({"capacity": longest - 1}, {"capacity": longest, "offline_fixed_batch": False}):
    try:
        RadixCache(1).ask(fixed | change)
    except Rejected as no:
        print(f"{no.reason}: {no.detail}")

# %% [markdown]
# Requests that arrive while others run are outside it. So are fairness, deadlines and unknown answer lengths.
#
# ## An index hit is not a scheduling decision
#
# The tree tells the scheduler what it found, and locks it, so that it stays true. It does not say who runs next.

# %%
handing = on_trace()
receipt = handing.last.handoff
for name in ("matched_tokens", "prefix_slot_ids", "path_node_ids", "suffix_interval", "lock_lease_id",
             "scheduler_owner", "policy_decision"):
    print(f"{name:<16} {getattr(receipt, name)}")

# %% [markdown]
# `policy_decision` is `None`, and a receipt with anything else in it is refused. The scheduler admits, defers or
# rejects. If it defers, the lease ends, and the receipt is worth nothing any more:

# %%
for said in ("defer", "admit"):
    print(f"{said:<6} {handing.do({'op': 'settle', 'receipt': receipt, 'disposition': said}) or 'done'}")

work = handing.machine.ask({"ask": "work", "prompt": 7, "matched": 6, "row_bytes": 65_536})
for name, value in work.items():
    print(f"{name:<28} {value:,}")

# %% [markdown]
# ## Failure lab
#
# Pick something forbidden. It is tried on a fresh machine, now. Look at the reason, and at the two digests.

# %%
article = lesson_radix.article()
lab = lesson.FailureLab(article)
display(lab)

# %% [markdown]
# All of them at once. Each is a few lines of JSON in `fixtures/loop7_radix.json`. You can add your own.

# %%
everything = lesson.refusals(article)
unchanged = sum(row[-1] == "= unchanged" for row in everything.rows)
print(f"{unchanged} of {len(everything.rows)} refused, digest unchanged")
display(everything)

# %% [markdown]
# Some of it has happened. The last row is next of kin to this lesson's beginning: duplicates were freed, and the table
# of a live request still listed them.

# %%
Table(["public bug", "what is tried", "refused with"],
      [[case.id, case.what, f"✗ {case.attempt().reason}"] for case in lesson_radix.stories()])

# %% [markdown]
# ## The same with words: chats grow the tree
#
# Now real text. Each chat is matched and locked, computes the rest, and leaves its rows to the tree. The pool has 40
# slots: at some point it is full, and leaves must go. **Change the chats and run the cell again.**

# %%
CHATS = {
    "Anna": "My dear Jane, I have a letter from London",
    "Ben": "My dear Jane, I have a cold",
    "Clara": "My dear Jane, I have a letter from Bath",
    "Dora": "It is a truth universally acknowledged",
    "Emma": "My dear Jane, I have a letter from London, and it is long",
}

grown = Tried(RadixCache(40))
ids = {name: tokenizer.encode(text) for name, text in CHATS.items()}
hits = {name: serve(grown, name, tokens) for name, tokens in ids.items()}
Table(["chat", "tokens", "found", "computed"],
      [[name, len(ids[name]), found, len(ids[name]) - found] for name, found in hits.items()])

# %%
pieces = {token: tokenizer.decode([token]) for tokens in ids.values() for token in tokens}
chats = grown.recording("Five chats, forty slots", pieces)
evicting = next((n for n, frame in enumerate(chats.frames) if frame.title.startswith("Evict")), 0)
display(widget(chats, frame=evicting))
print(*chats.frame(evicting).text().split("\n")[:3], sep="\n")

# %% [markdown]
# Emma asks for what Anna has left: a chat's second turn is nothing else. **What was generated is cached, too**, so the
# next turn finds question and answer (sglang pull request 16521).
#
# **On real agents.** Put the path of a file of message lists below, in JSON or JSON lines; the tau-bench runs are
# such a file. It needs SmolLM2's tokenizer (`python -m kvlab get-model`). This cell's output is not stored and not
# compared.

# %% tags=["nbval-ignore-output"]
YOUR_FILE = None

if YOUR_FILE:
    turns = list(found_in(islice(MessageTrace(YOUR_FILE, "smollm2"), 120), slots=60_000))
    display(Table(["chat", "turn", "prompt tokens", "found"], turns))
    print(f"found: {sum(t[3] for t in turns) / sum(t[2] for t in turns):.1%} of all prompt tokens")
else:
    print("No file named: the five chats above stand in for it.")

# %% [markdown]
# We ran it on the first 120 requests of the tau-bench airline runs, ten agents one after another, with 60,000 slots:
# **94.1 %** of all prompt tokens were found (measured). It is one long chat after another with one system prompt, so it
# is a good case, not a typical one.
#
# ## What you take with you
#
# - A radix tree owns its slots. A table refers to them. Free only what you own: `slots[protected_len:prefix_len]`.
# - A match may split one edge, where it stands. Locks cover the path, up to the root.
# - Evictable is not leaf-ready. Leaves go first, and an edge goes whole.
# - Which leaf goes first is a policy. Who runs next is not the tree's business.
# - The depth-first bound holds for a fixed batch, its own tree and a cache that holds the longest request.
#
# **Try it.** Give the five chats 30 slots, then 200. Let Clara run on (`runs_on=True`) and predict what is evicted
# instead. Choose another order with `RadixCache(40, eviction="mru")`.
#
# **The next question.** Every slot here was chosen by a table: attention has to follow it, row by row. Why not just
# one big contiguous tensor for each chat? Lesson 8 borrows the page table of the GPU for that. It takes from this
# lesson what a slot id is: a place with one owner, and nothing about what the bytes mean.
