# %% [markdown]
# # Lesson 3 · Where did the memory go?
#
# **The dashboard says 75 % used. Who uses it?**
#
# A chat is open in three tabs. Tab **A** has all of it. In tab **B** you went back a few words, to try another ending.
# In tab **C** you went back almost to the start. All three live in the K/V memory of one server. How much do they take?
#
# You will first act on the naive answer, on a real model, and spend money on it. Then you meet three ledgers that
# answer three questions, and never make one total. Run the cells from the top. You need no GPU and no download.

# %%
import copy

import torch
from IPython.display import display

from kvlab.contract import History, Rejected
from kvlab.execution.model import load_model
from kvlab.memory import ledger
from kvlab.memory.allocator import Allocator
from kvlab.memory.block_pool import index_of
from kvlab.memory.books import Books
from kvlab.memory.kv_store import PagedMemory, PagedStore
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.memory.ledger import from_snapshot
from kvlab.study import fixtures, lesson, lesson_ledger, occupancy
from kvlab.study.geometries import cost_line
from kvlab.study.lesson import Comparison, Question, Stills, Table, World
from kvlab.study.traces import EMBEDDED, AzureArrivals
from kvlab.views.stage import widget

torch.set_num_threads(1)  # so small a model runs best on one thread
device = "cuda" if torch.cuda.is_available() else "cpu"
model, tokenizer = load_model("austen", device=device)  # small, and in this repository

PARTS = ("The two young ladies were walking in the garden one morning", ", when they saw a gentleman",
         " with a letter in his hand; and")
CHAT = "".join(PARTS)
C_END, B_END, A_END = (len(tokenizer.encode("".join(PARTS[:n]))) for n in (1, 2, 3))
print(f"C goes back to token {C_END}, B to token {B_END}, A has all {A_END}.")


# %% [markdown]
# The server has **8 blocks of 16 tokens**. The tabs begin alike, so they share what they have in common. A tab that
# goes back keeps its first tokens and drops the rest.

# %%
def server(num_blocks=8):
    """A real model over paged memory with one cache group; block ids start at 100, as in the article."""
    c, width = model.config, torch.empty(0, dtype=model.dtype).element_size()
    group = CacheGroup("kv", 0, c.layers, c.kv_heads, c.head_dim, width, 16, num_blocks, 100)
    layout = CacheLayoutManifest((group,))
    allocator, store = Allocator(layout), PagedStore(layout, model.dtype, model.device)
    allocator.observers.append(store.poison)
    return World(model, tokenizer, PagedMemory(allocator, store))


def open_tabs(world):
    world.read("A", CHAT)
    for tab, end in (("B", B_END), ("C", C_END)):
        world.branch("A", tab)
        world.memory.allocator.truncate(tab, end)


def tables(world):
    return {r: row["tables"]["kv"] for r, row in world.memory.allocator.snapshot()["requests"].items()}


office = server()
history = History(office.memory.allocator)
open_tabs(office)
tabs_only = history.now
Table(["tab", "tokens", "its block table"],
      [[r, office.memory.length(r), ", ".join(t)] for r, t in tables(office).items()])


# %% [markdown]
# ## The naive answer: count the entries
#
# Every entry of a block table is a block, so add them up. That is a dashboard in one line. Then three colleagues open
# the chat too: tabs **D**, **E** and **F**.

# %%
def dashboard(world):
    return sum(map(len, tables(world).values()))


def gauge(world, who):
    used, of = dashboard(world), world.memory.allocator.groups[0].num_blocks
    print(f"{who:<12}{used:>3} blocks in use of {of}: {100 * used / of:.0f} %")


gauge(office, "A, B, C")
for tab in "DEF":
    office.branch("A", tab)
gauge(office, "A to F")

# %% [markdown]
# **188 % full.** So somebody writes a purchase order: 15 blocks are needed, 8 are there, 7 more to buy. At the size of
# Llama-3-8B a block is 2 MiB; a pool of 40 GiB becomes one of 75.
#
# Before you sign it, let all six tabs go on, in the old pool. Nobody gets a byte more.

# %%
LINES = {"B": " in a carriage", "C": " and", "D": " Jane", "E": " he", "F": " the letter"}

alone = server()
alone.read("A", CHAT)
alone.speak("A", tokens=8)

for tab, line in LINES.items():
    office.read(tab, line)
office.speak("A", "B", "C", tokens=2)
office.speak("A", "D", "E", "F", tokens=6)

pool = office.memory.allocator.pools[0]
print(f"really in use: {pool.num_blocks - pool.free_count} of {pool.num_blocks}")
print("A says what it says alone:", office.reply("A") == alone.reply("A"))
for tab in "ABCDEF":
    print(f"{tab}: …{(PARTS[{'B': 1, 'C': 0}.get(tab, 2)] + LINES.get(tab, ''))[-24:]}|{office.reply(tab)}")

# %% [markdown]
# Six tabs answer, in 8 blocks. The seven blocks on the order would have stood empty. What was counted were
# **references**; what was bought were **blocks**.
#
# ## The contract: three ledgers
#
# | Ledger | The question it answers | A row that three tabs share counts |
# |---|---|---|
# | **request views** | How much would these tabs take if nobody shared? | three times |
# | **distinct blocks** | How much memory holds something now? | once |
# | **pool** | How much was provided? | once, and idle blocks count, too |
#
# Each is right. None replaces another, and their sum means nothing. Here they are, tab by tab, as the machine did it.
# **Step with → and ←.** Left, each tab's own view of each block. In the middle, each block once. Right, the pool.

# %%
recording = lesson_ledger.record(history, title="Three tabs, three ledgers", question="Where did the memory go?",
                                 reserved=64)
three_tabs = next(n for n, f in enumerate(recording.frames) if f.title == f"Truncate C to {C_END} tokens")
Stills(recording.frame(three_tabs))

# %%
display(widget(recording, frame=three_tabs))

# %%
print(recording.frame(three_tabs).text())

# %% [markdown]
# ## First, one row
#
# All ledgers count rows. A row is what one token's K and V take, in bytes:
#
# `layers × K/V heads on this rank × head width × (bytes of a K scalar + bytes of a V scalar)`
#
# The well-known factor 2 is only there where K and V are equally wide. *What does one token cost on my model, at TP 2?*

# %%
for name, tp in (("llama-3-8b", 1), ("llama-3-8b", 2), ("qwen2.5-7b", 2), ("qwen2.5-7b", 8), ("austen", 2)):
    print(cost_line(name, tp))
try:
    cost_line("smollm2", 2)
except ValueError as no:
    print("SmolLM2-135M, TP 2:", no)

# %% [markdown]
# Look at Qwen2.5-7B on 8 ranks. It has 4 K/V heads, so vLLM gives each rank one head, and each head lies on two ranks.
# A rank-local number times the number of ranks is then no longer the size of the model's K/V. That is why every amount
# in kvlab says whether it is rank-local or model-wide. For your own model, pass the path of its `config.json`.
#
# ## The three ledgers in numbers
#
# From here on a row has the article's size: 32 layers, 4 heads on this rank, width 128, FP16. That is 64 KiB a row and
# 1 MiB a block. The block tables are the ones of your three tabs.

# %%
trace = fixtures.load_fixture(fixtures.FIXTURES / "loop3_ledgers.json")
books = Books(trace["base"])
(mine,) = from_snapshot(tabs_only.committed, {"A": 64, "B": 48, "C": 32})
assert {v.request: (v.tokens, v.blocks) for v in mine.requests} == {
    r: (row["tokens"], tuple(row["blocks"])) for r, row in trace["base"]["requests"].items()}

identities = books.ask({"ask": "identities"})
WORDS = {"rect": "rectangles reserve = live + slack", "paged_view": "request views = live + unused",
         "unique": "distinct blocks = rows + unused", "capacity_avoided": "views = distinct + not taken twice",
         "dedup": "live in views = rows + not stored twice"}
Table(["identity", "MiB", "= MiB", "+ MiB"],
      [[WORDS[name], row["lhs_mib"], *row["rhs_mib"]] for name, row in identities.items()])

# %% [markdown]
# The last two lines are two different savings. Sharing avoids **3 MiB** of blocks, and it avoids storing **2.5625
# MiB** of rows a second time. Quote one where the other is meant, and your capacity plan is wrong.
#
# Now try to make one total, as a spreadsheet would.

# %%
for terms in (["rectangular.logical", "rectangular.slack"], ["request_view.capacity", "unique.capacity"],
              ["rectangular.slack", "fragmentation.out_of_reach"], ["unique.tail", "pool.free"]):
    try:
        print(" + ".join(terms), "=", books.ask({"ask": "add", "terms": terms})["mib"], "MiB")
    except Rejected as no:
        print(" + ".join(terms), "✗", no.reason)

# %% [markdown]
# ## The moment: 22 wasted slots
#
# The tabs' six table entries have 96 slots, and show 74 rows. **22 slots look wasted.** An engineer writes a job that
# reclaims them: whatever lies behind the last token of a table is handed out again. Run it on the real memory.

# %%
view = books.ask({"ask": "request_view"})
Table(["tab", "unused slots it sees", "of these hold rows of another tab"],
      [[r, n, view["hidden_rows"][r]] for r, n in view["tail_by_request"].items()])


# %%
def reclaim(world, tabs):
    """Overwrite what lies behind the last token in the last block of some tabs, as a new owner would."""
    for tab in tabs:
        live, store = world.memory.allocator.requests[tab], world.memory.store
        block, seen = index_of(live.tables[0][-1]), (live.context - 1) % 16 + 1
        for tensor in (store.k[0], store.v[0]):
            tensor[:, block, seen:] = 0


after_reclaim = {}
for name, tabs in {"nobody's": "", "A's 15": "A", "B's 7": "B"}.items():
    world = server()
    open_tabs(world)
    reclaim(world, tabs)
    world.speak("A", tokens=14)
    after_reclaim[name] = world.reply("A")

print("reclaim A's 15 slots:", "nothing happens" if after_reclaim["A's 15"] == after_reclaim["nobody's"] else "harm")
Comparison(A_before=CHAT[-24:] + after_reclaim["nobody's"], A_after_B_s_7_slots=CHAT[-24:] + after_reclaim["B's 7"])

# %% [markdown]
# **Seven of the "wasted" slots were A's words.** B cannot see rows 9 to 15 of block 101. They are still valid: A wrote
# them, and A reads them. Only 15 slots hold nothing: the rest of block 102. That is the number in the ledger of
# distinct blocks, and the only one that a reclaim job may use.
#
# ## Predict
#
# The three tabs again, on a fresh server. Tab A says **20 more tokens**. Then tab B says one token. Answer before you
# press the button: the machine runs, and grades you.

# %%
def counted(world):
    (h,) = from_snapshot(world.memory.allocator.snapshot())
    return ledger.request_view(h), ledger.unique(h)


def run_the_machine():
    world = server()
    open_tabs(world)
    world.speak("A", tokens=20)
    seen, real = counted(world)
    truth = {"a": seen.tail_by_request["A"], "views": seen.tail_slots, "real": real.tail_slots}
    world.read("B", " in")
    seen, real = counted(world)
    truth |= {"blocks": len(real.ids), "hidden": seen.hidden_rows["B"]}
    growing, tails = server(), {}
    growing.read("A", CHAT)
    for length in range(A_END, 49):
        tails[length] = counted(growing)[0].tail_slots
        growing.speak("A")
    return truth | {"least": [n for n, t in tails.items() if t == min(tails.values())]}


quiz = lesson.Predictions([
    Question("a", "A has 53 tokens now. How many unused slots are in its last block?",
             "53 tokens take 4 blocks, and a block is taken whole.", "slots"),
    Question("views", "How many unused slots do the three tabs see together?", "B and C see what they saw.", "slots"),
    Question("real", "How many slots of distinct blocks hold nothing?", "B's seven hold rows of A.", "slots"),
    Question("blocks", "B has said its token. How many distinct blocks are there now?",
             "B's tail had two owners, so it was copied first.", "blocks"),
    Question("hidden", "How many of B's unused slots hold rows of A now?", "The copy moves what B can see.", "slots"),
    Question("least", f"Between {A_END} and 48 tokens, at which length does A alone leave the fewest slots unused?",
             "Where the length is a multiple of 16.", "tokens"),
], run_the_machine)
display(quiz)

# %% [markdown]
# Press the button before you read on. What follows gives it away.
#
# ## The expected tail, and yours
#
# If a request ends anywhere in a block with equal chance, it leaves (16 − 1) / 2 = **7.5** slots unused. Let A grow
# token by token on the real model, and look:

# %%
growing, tails = server(), []
growing.read("A", CHAT)
for _ in range(16):
    tails.append(counted(growing)[1].tail_slots)
    growing.speak("A")
print("unused slots, A from", A_END, "to", A_END + 15, "tokens:", *tails)
print("mean over these sixteen lengths:", sum(tails) / len(tails))
print("expected:", books.ask({"ask": "expected_tail", "block_size": 16})["slots"],
      "| the three tabs of this lesson:", books.ask({"ask": "unique"})["tail_slots"])

# %% [markdown]
# A mean over all lengths, and no prediction for one. Your tabs leave 15, because the longest one ends one row into a
# block. For a fleet, use your own lengths: further down you do.
#
# ## Fragmentation is not a number of bytes
#
# One stretch of 12 MiB, 9 of them allocated. Free are a piece of 1 MiB and one of 2. Now 2.5 MiB are wanted in one
# piece:

# %%
MIB = 2**20
found = books.ask({"ask": "fragmentation", "candidate": 5 * MIB // 2})
print(f"free {found['total_free'] // MIB} MiB, largest piece {found['largest_free'] // MIB} MiB: {found['contiguous']}")
print("external fragmentation:", found["ratio"])
print("the same 2.5 MiB as blocks:", found["block_pool_fit"])

full = {"arena": {"size": 12 * MIB, "allocated": 12 * MIB, "free_extents": []}}
empty = books.ask({"ask": "fragmentation", "candidate": MIB, "instead": full})
print("and when nothing is free:", empty["ratio"])
try:
    books.ask({"ask": "fragmentation_ratio", "instead": full})
except Rejected as no:
    print("asked for a number:", no.reason)

# %% [markdown]
# The ratio describes one moment and one shape. It is not "1 MiB lost", so there is nothing to add to anything. With no
# free byte there is no ratio. A dashboard that prints 0 there, or 1, has made it up.
#
# Coarse, contiguous allocation fails in four ways. Each has a measure of its own:

# %%
measured = books.ask({"ask": "contiguous_failures", "candidate": 5 * MIB // 2})["measured"]
slack, twice = (measured[k]["mib"] for k in ("internal_reservation_slack", "duplication"))
admitted = measured["over_reservation"]
Table(["failure", "here"], [
    ["internal reservation slack", f"{slack} MiB reserved and not live"],
    ["external fragmentation", f"{measured['external_fragmentation']['ratio']}, and 2.5 MiB do not fit"],
    ["over-reservation", f"{admitted['admitted_into_their_live_bytes']} of {admitted['requests']} tabs fit into the "
                         "bytes that all of them live in"],
    ["duplication", f"{twice} MiB would be stored again"]])

# %% [markdown]
# **What an engine does, and what we demand.**
#
# | | vLLM (observed in its `BlockPool.get_usage`) | kvlab (the contract) |
# |---|---|---|
# | the usage gauge | 1 − free / all blocks, without the null block: distinct blocks | three ledgers, by their names |
# | a cached block nobody uses | counts as free | idle in the pool ledger; its identity in the metadata ledger |
# | adding two ledgers | nobody stops you | refused: `ledgers_not_addable` |
#
# So that gauge is right. The trouble starts where somebody adds up block tables, or requests, or lengths instead.
#
# ## Failure lab
#
# A capacity report is a record like any other. Everything in it that can be computed is computed again. Pick a wrong
# report, and see it bounce. Look at the reason, and at the two digests.

# %%
lab = lesson.FailureLab(trace)
display(lab)

# %%
everything = lesson.refusals(trace)
unchanged = sum(row[-1] == "= unchanged" for row in everything.rows)
print(f"{unchanged} of {len(everything.rows)} refused, digest unchanged")
display(everything)

# %% [markdown]
# Write a wrong report of your own: change one number below, and run the cell.

# %%
report = copy.deepcopy(trace["base"])
report["declared"]["unique_blocks"] = ledger.request_view(mine).references
try:
    books.load(report)
except Rejected as no:
    print("refused:", no.reason)
    print("        ", no.detail)

# %% [markdown]
# ## The same at work: a chat service for two minutes
#
# 600 requests arrive, with prompts of about 1,000 tokens and answers of about 130. Three ways to give them memory:
#
# 1. a **rectangle for the maximum** of 16,384 tokens each,
# 2. a **rectangle of the next power of two** of the final length, as if somebody knew it,
# 3. **pages** of 16 tokens from the real allocator.
#
# The rows are Llama-3-8B's on one rank. A trace has no service times, so the assumptions stand under the picture.

# %%
found = occupancy.run(AzureArrivals(EMBEDDED))
Table(["layout", "GiB at its peak", "% live at its peak", "% live over the time"],
      [[r["layout"], *(f"{r[k]:.1f}" for k in ("peak_gib", "live_at_peak", "live_over_time"))]
       for r in occupancy.rows_of(found)])

# %%
lesson_ledger.plot(found, lesson_ledger.credit(EMBEDDED))

# %% [markdown]
# The same requests, the same live rows, the grey area. The rectangles take more than they hold. The pages lie so close
# to the rows that you can hardly tell them apart: what they lose is half a block for each request.
#
# **Paper-reported**, and not measured here: the PagedAttention paper (figure 2) gives token states 20.4 to 38.2 % of
# the K/V memory in three Orca variants, and 96.3 % in vLLM. Its workload was another one, so a share here may be higher
# or lower; that pages beat rectangles is what you can check.
#
# **On a real service.** The Azure LLM inference trace 2023 has 19,366 chat requests. Put the path of your copy of
# `AzureLLMInferenceTrace_conv.csv` below. This cell's output is not stored and not compared.

# %% tags=["nbval-ignore-output"]
YOUR_FILE = None

if YOUR_FILE:
    real = occupancy.run(AzureArrivals(YOUR_FILE))
    display(lesson_ledger.plot(real, lesson_ledger.credit(YOUR_FILE)))
else:
    print("No file named: the embedded arrivals above stand in for it.")

# %% [markdown]
# We ran it on that file, with the assumptions above: at the peak 7.2 % of the rectangles for the maximum were live,
# 55.5 % of the powers of two, **99.5 % of the pages** (measured, on arrivals from the Azure LLM inference trace 2023,
# CC-BY 4.0; it takes about 15 seconds).
#
# Larger blocks mean less bookkeeping and more air. How much more?

# %%
sweep = []
for block_size in (16, 64, 256, 1024):
    at = occupancy.run(AzureArrivals(EMBEDDED), occupancy.Assumptions(block_size=block_size))
    peak = at.peaks[occupancy.PAGED]
    unused = (peak.reserved_rows[occupancy.PAGED] - peak.live_rows) / peak.requests
    expected = ledger.expected_tail(block_size).slots
    sweep.append([block_size, f"{100 * at.peak_share(occupancy.PAGED):.1f}", f"{unused:.1f}", expected])
Table(["block size", "% live at the peak", "unused slots a request", "expected, if ends were uniform"], sweep)

# %% [markdown]
# Nearly the formula, for this service. For requests that share a system prompt, or that all end alike, it would not
# be. That is a question to your own lengths.
#
# ## What you take with you
#
# - Say which ledger. References, distinct blocks and the pool answer three questions.
# - An unused slot in a view may be somebody's row. Only the distinct blocks know what is empty.
# - Slack is bytes. Fragmentation is a ratio of one moment, or `not_applicable`. An expectation predicts no trace.
#
# **Try it.** Give `server` 7 blocks, and read the refusal. Open a tab G at token 20 and predict its hidden rows. Set
# `YOUR_FILE`, or a decode rate of 10 in `occupancy.Assumptions`, and predict the peak.
#
# **The next question.** You know now that block 101 holds seven rows that B must not touch. But where *is* block 101,
# in bytes? What does the kernel read when it is told "block 101, row 9, layer 2, head 1"? Lesson 4 follows one token
# down to its address. This contract hands it the row: so many bytes, in this cache group, on this rank.
