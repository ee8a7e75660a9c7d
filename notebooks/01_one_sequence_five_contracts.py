# %% [markdown]
# # Lesson 1 · One sequence, five contracts
#
# **Where is my conversation while the model is thinking?**
#
# A language model reads your text once. For every token it keeps two rows of numbers in each layer, K and V, and looks
# back at them for every next word. Those rows *are* your conversation. Five people chat at the same time here, so:
# whose rows lie where, and who says that they are yours?
#
# You will see the simple answer fail, follow one token through the better one, and then break that on purpose, five
# times. You need no other lesson, no GPU and no download.

# %%
import torch
from IPython.display import display

from kvlab.contract import Rejected
from kvlab.execution.adapters import seeded_adapter, with_adapter
from kvlab.execution.model import load_model
from kvlab.memory import ledger
from kvlab.memory.address import follow as find_byte
from kvlab.memory.address_bytes import address_snapshot
from kvlab.memory.block_pool import index_of
from kvlab.memory.kv_store import RectangularMemory
from kvlab.memory.ledger import Holdings, View
from kvlab.memory.records import RECEIPT_FIELDS
from kvlab.study import fixtures, lesson, savings
from kvlab.study.contract_walk import follow
from kvlab.study.lesson import Comparison, PagedWorld, Question, Stills, Table, World
from kvlab.study.lesson_contracts import CONTRACTS, Chats, merged, noticed, rectangle_facts, row_addresses
from kvlab.study.physical_state import OBLIGATIONS, physical_state
from kvlab.study.rounds import Rounds
from kvlab.study.sources import SOURCES
from kvlab.views import contracts
from kvlab.views.stage import widget

torch.set_num_threads(1)  # so small a model runs best on one thread
model, tokenizer = load_model("austen")  # small, trained on Jane Austen, in this repository

STORY = ("The two young ladies were walking in the garden before dinner, "
         "when they saw a gentleman coming up the road; and it was")
EVENING = " In the evening they were all in the garden, and in good spirits, and as to the ball,"
CHATS = {
    "A": STORY + " Mr. Darcy. He",
    "B": STORY + " her brother, and she cried",
    "C": STORY,
    "D": "Mr. Knightley was the owner of a large house." + EVENING,
    "E": "I have been ill, my dear sister, all this week." + EVENING,
}
NAMES = dict(zip(CHATS, ("Anna", "Ben", "Clara", "David", "Emma"), strict=True))
Table(["chat", "who", "tokens", "begins"],
      [[chat, NAMES[chat], len(tokenizer.encode(text)), text[:44] + "…"] for chat, text in CHATS.items()])

# %% [markdown]
# ## The simple answer: a rectangle each
#
# Nobody knows how long a chat will get. So reserve the most that it may come to, 512 tokens here, in one piece. There
# is memory for four such pieces. The loop below is what a server does all day: look who is where, choose, ask for room,
# run the model, publish.

# %%
ROOM, MOST = 4, model.config.max_position
c = model.config
rectangles = World(model, tokenizer, RectangularMemory(c.layers, c.kv_heads, c.head_dim, slots=ROOM, max_length=MOST))
server = Rounds(rectangles, CHATS)
for _ in range(19):
    server.round()

for chat, no in server.refused.items():
    print(f"{NAMES[chat]} is refused: {no.reason} ({no.detail})")

# %%
views = tuple(View(chat, rectangles.memory.length(chat), (), MOST) for chat in rectangles.logits)
held = ledger.rectangular(Holdings("all layers", model.kv_row_bytes(), 16, views, {}, 0))
print(f"reserved {held.reserved.mib:.2f} MiB, of which {held.logical.mib:.2f} MiB hold rows")
print(f"{100 * held.slack_rows / held.reserved_rows:.0f} % of the reserved bytes hold nothing")
Table(["chat", "tokens", "reserved", "empty"],
      [[NAMES[v.request], v.tokens, v.reserved, f"{100 * (1 - v.tokens / v.reserved):.0f} %"] for v in views])

# %% [markdown]
# **Emma is turned away from a memory that is almost nine tenths empty.** The room is not missing. It is promised to
# rows that may never come.
#
# ## The better answer: pages
#
# The same number of bytes, cut into blocks of 16 tokens. A chat gets a block when it needs one, and a *block table*
# says which. The same loop, the same five chats:

# %%
pages = PagedWorld(model, tokenizer, num_blocks=ROOM * MOST // 16)
server = Rounds(pages, CHATS)
for _ in range(20):
    server.round()

pool = pages.allocator.pools[0]
print("refused:", ", ".join(server.refused) or "nobody")
print(f"blocks in use: {pool.num_blocks - pool.free_count} of {pool.num_blocks}")
print("the four say what they said:", all(words == pages.said[chat][: len(words)]
                                          for chat, words in rectangles.said.items()))
print("Emma: …" + CHATS["E"][-14:] + pages.reply("E"))

# %% [markdown]
# All five are in. But look at what was given up for it. A rectangle makes three promises; the addresses of Anna's rows
# tell which of them still hold:

# %%
row = c.kv_heads * c.head_dim * 4
blocks = -(-pages.memory.length("A") // 16)
facts = {"rectangle": rectangle_facts(row_addresses(rectangles, "A"), row, MOST, MOST),
         "pages": rectangle_facts(row_addresses(pages, "A"), row, 16 * blocks, MOST)}
Table(["promise", *facts], [[name.replace("_", " "), *(f[name] for f in facts.values())] for name in facts["pages"]])

# %% [markdown]
# "Token 17 is 17 rows further on" is no longer true. Someone must now say where it is, and whose. An operating system
# has page tables for that, and they are not enough here. Paging K and V owes six things more. Each has one place in
# this package:

# %%
Table(["what paging K/V owes", "who does it here"],
      [[name.replace("_", " "), where.removeprefix("kvlab.").replace(":", ", ")]
       for name, where in OBLIGATIONS.items()])

# %% [markdown]
# ## The contract: five questions that are not one
#
# People say "cache reuse" and mean five different things.
#
# | Contract | Its question | What answers it | Lessons |
# |---|---|---|---|
# | **address** | Where do the bytes live? | block table, virtual map | 4, 8 |
# | **ownership** | Who may read, write and free them? | reference counts, leases, transactions | 5 |
# | **identity** | Do they mean the same computation? | manifests | 2 |
# | **index** | How is the longest match found? | hash chain, radix tree | 6, 7 |
# | **execution reuse** | Can shared work be done once? | partial attention, merged | 9 |
#
# And somebody else decides who runs next. Watch one round of the loop, with what the memory did in between. A wish is
# no ownership: **until it is published, the memory owes nobody anything.**

# %%
server.waiting["F"] = tokenizer.encode("Emma was not quite")
server.log.clear()
pages.allocator.observers.append(
    lambda event: server.log.append(f"    memory, {event.kind}: {event.step} {event.group}"))
server.round()
del pages.allocator.observers[-1]
print(*(line.replace("_", " ").rstrip() for line in server.log), sep="\n")

# %% [markdown]
# ## Slow motion: one token
#
# Ben read Anna's story over her shoulder. He branches from it and types *her brother, and she cried*. Follow the token
# *brother* from there to the next word. Each contract lights up as it is crossed. **Step with → and ←, play with
# space.**

# %%
length = len(tokenizer.encode(STORY))
clara = with_adapter(model, seeded_adapter(model, seed=8, rank=4, scale=0.3))


def two_chats(**how):
    """Anna has read the story and said her line."""
    world = Chats(model, tokenizer, {"C": clara}, num_blocks=128, **how)
    world.ask("A", STORY)
    world.go_on("A", CHATS["A"][len(STORY):])
    return world


walked = two_chats(combine=merged)
walk = follow(walked, "A", "B", length, CHATS["B"][len(STORY):], token=1)
recording = contracts.recording(walk, title="One token, five contracts", question="Where is my conversation?")
display(widget(recording))

# %%
Stills(recording.frames[3], recording.frames[6])

# %% [markdown]
# Above: a block is reserved for Ben and nobody sees it yet, so the digest has not moved. Below: his next word looks
# back over 47 rows, 32 of which are Anna's too. Here is the last frame in words:

# %%
print(recording.frames[-1].text())

# %% [markdown]
# ## Predict: which chat breaks?
#
# Now switch off **one contract at a time**, around the same machinery, on the same model. Who is hurt? The five, again:
#
# | | Chat | Stands where |
# |---|---|---|
# | 1 | Anna | read the story, said her line |
# | 2 | Ben | branched from Anna's story: shares two full blocks and the tail with her |
# | 3 | Clara | sends Anna's story too, but has an *adapter*, her own small change of the weights |
# | 4 | David | a house, then *In the evening they were all…* |
# | 5 | Emma | a letter, then the very same *In the evening they were all…*; she came before David |

# %%
def five_chats(off="", **how):
    """All five, each with 14 words of an answer; the contract `off` is switched off."""
    world = two_chats(off=off, **how)
    world.branch_at("A", "B", length, CHATS["B"][len(STORY):])
    for chat in "CED":
        world.ask(chat, CHATS[chat])
    world.speak(*CHATS, tokens=14)
    return world


honest = five_chats()


def hurt(world):
    """The chats that say something else than they should."""
    return [chat for chat in CHATS if world.reply(chat) != honest.reply(chat)]


def run_the_machine():
    return {off: [list(CHATS).index(chat) + 1 for chat in hurt(five_chats(off))] for off in CONTRACTS}


quiz = lesson.Predictions([
    Question("address", "Address off: attention takes a row's slot id for its place in memory. Who breaks?",
             "All chats read through the same translator."),
    Question("ownership", "Ownership off: Ben's line is written in place, into the tail he shares. Who breaks?",
             "Whoever else had rows there. The writer himself reads what he wrote."),
    Question("identity", "Identity off: the adapter is ignored. Who breaks?",
             "Whoever is handed rows that other weights made."),
    Question("index", "Index off: a block is found by its own 16 tokens, whatever came before. Who breaks?",
             "Whoever comes second with the same 16 tokens in the same place."),
    Question("execution_reuse",
             "Execution reuse off: shared and own rows are answered apart, then averaged. Who breaks?",
             "Those that share a block, and only they, have two parts."),
], run_the_machine)
display(quiz)

# %% [markdown]
# Type numbers, press the button, then read on. What follows gives it away.
#
# ## The reveal
#
# Five real runs. **Address** first. Each row is read where another layer has its row. Everybody is hurt, at once:

# %%
broken = {off: five_chats(off) for off in CONTRACTS}


def show(off, chat):
    print(f"{off.replace('_', ' ')} off. Hurt: {', '.join(NAMES[r] for r in hurt(broken[off]))}")
    start = "…" + CHATS[chat][-14:]
    return Comparison(**{f"{NAMES[chat]}_should_say": start + honest.reply(chat),
                         "but_says": start + broken[off].reply(chat)})


show("address", "A")

# %% [markdown]
# It looks like English and is none. **Ownership**: Ben wrote over Anna's *Mr. Darcy*. She is hurt, he is not:

# %%
show("ownership", "A")

# %% [markdown]
# Fluent, and about somebody else. **Identity**: Clara was given Anna's rows, since the tokens are the same:

# %%
show("identity", "C")

# %% [markdown]
# She has an adapter and gets the words of the base model. Good words. Not hers. **Index**: David's second block has the
# same 16 tokens as Emma's, so he was given hers. It was computed behind *her* letter:

# %%
show("index", "D")

# %% [markdown]
# **David wrote about *them*, and his chat says *I*.** Nothing of Emma's text is in his prompt. It reached him through
# rows. **Execution reuse**: 32 shared rows and the chat's own rows, each answered apart, then averaged:

# %%
show("execution_reuse", "B")

# %% [markdown]
# Every row was right and in its place, and still: the mean of two answers is no answer. In the query on the stage, the
# shared rows deserve a fifth of a head's weight at most; the mean gives them half. Merged rightly, in the same two
# parts, all five speak as they should:

# %%
assert max(walk["execution_reuse"]["weight"]) <= 20
apart = five_chats(combine=merged)
print("in two parts, merged:", "all five as they should" if not hurt(apart) else hurt(apart))

# %% [markdown]
# ## Who could have noticed?
#
# After each run, every contract's own checks were made, all of them: addresses resolved again, counts recounted,
# manifests compared, keys recomputed, attention measured against an exact oracle.

# %%
verdicts = {off: noticed(world) for off, world in {"": honest, **broken}.items()}
Table(["switched off", "hurt", *(name.replace("_", " ") for name in CONTRACTS)],
      [[off.replace("_", " ") or "nothing", " ".join(hurt(broken[off])) if off else "–",
        *(f"✗ {said}" if said else "passes" for said in verdicts[off].values())] for off in verdicts])

# %% [markdown]
# **One column a row.** The other four pass, and they are right to: what they watch is in order. That is why there are
# five contracts and not one. Two honest notes: ownership speaks *before* the write, when it is asked (afterwards even
# the recount passes). And identity is asked about what the index claims to have found; shown the whole prefix, it
# would refuse David's block too:

# %%
wrong = broken["index"]
_, _, block = wrong.taken[0]
print("asked about block 1 alone:     ", wrong.compatible("D", block) or "may be reused")
wrong.off = ""
print("asked about the whole prefix:  ", wrong.compatible("D", block))

# %% [markdown]
# The mechanisms behind the index and the merge come later (lessons 6, 7 and 9). Here they were a few lines around real
# rows.
#
# ## Four things that do not follow
#
# *Allocation is not identity.* *Identity is not an index.* *An index hit is not a scheduling decision.* *Storage reuse
# is not execution reuse.* Each is one line that could turn out otherwise:

# %%
owner = five_chats()
owner.memory.fork("A", "G")  # G now owns Anna's blocks
owner.ids["G"], owner.voices["G"] = owner.ids["A"], owner.voices["C"]
block = owner.published[owner.keys(owner.ids["A"])[0]]
print("G owns the block, may it read it?  ", owner.compatible("G", block))
try:
    owner.allocator.apply({"op": "lookup", "key": "5fdc"})
except Rejected as no:
    print("who holds identities can look up?  ", no.reason)
decisions = [name for name in RECEIPT_FIELDS if any(word in name for word in ("admi", "schedul", "priorit"))]
print("a receipt says who runs next?      ", decisions or "no such field")
ways = savings.costs(model, tokenizer, STORY)
print(f"two chats share all {length} rows; read:  {ways[2].read_rows} rows for their next words")

# %% [markdown]
# The last one deserves numbers. Two chats with one beginning, four ways, each measured. Every step down saves one thing
# and nothing else:

# %%
for name, amount in savings.saved(ways).items():
    print(f"{name.replace('_', ' '):<36}{amount:>7,} {'bytes' if 'bytes' in name else 'rows'}")
Table(["two chats, one beginning", "bytes stored", "rows computed", "rows read for the next word"],
      [[w.way, w.stored_bytes, w.computed_rows, w.read_rows] for w in ways])

# %% [markdown]
# ## What is known of a conversation
#
# Put the facts of all contracts side by side and you have what the article calls `KVPhysicalState`. No engine has such
# a class; it is a way of reading one. Each field says who asks for it: a *paper*, *pinned source* (seen in an engine at
# a pinned commit), or this *rewrite*.

# %%
gate, space = walked.records.gate(members=("anna", "ben")), walked.records.space.name
gate.publish(gate.authorize("anna", space), walked.bundle("A", 1)[0], "g0", walked.manifest("A", 32))
match = gate.lookup(gate.authorize("ben", space), "g0", walked.manifest("B", 32))
state = physical_state(
    walked.allocator.snapshot(), gate.snapshot(), wanted=walked.keys(walked.ids["B"]), match=match.to_dict(),
    prompt_tokens=len(walked.ids["B"]), allocation=walked.history.now.receipt)


def brief(value):
    text = str(value).replace("'", "")
    return text if len(text) <= 52 else text[:51] + "…"


Table(["contract", "field", "here and now", "asked for by", "look in"],
      [[group.replace("_", " "), name.replace("_", " "), brief(f.value), f.claim, f.source]
       for group, fields in state.items() for name, f in fields.items()])

# %%
Table(["pinned", "commit", "what we read there"],
      [[s.label, s.commit[:12] or "paper", "; ".join(s.reads)] for s in SOURCES.values()])

# %% [markdown]
# ## Failure lab
#
# So far you broke contracts from outside. From inside they do not let you. Pick something forbidden; it is tried on a
# fresh machine, now. Look at the reason, and at the two digests.

# %%
lab = lesson.FailureLab(fixtures.load_fixture(fixtures.FIXTURES / "loop5_ownership.json"))
display(lab)

# %%
tried = []
for name, file in {"ownership": "loop5_ownership", "address": "loop4_addresses", "identity": "loop2_identity",
                   "bytes": "loop3_ledgers"}.items():
    trace = fixtures.load_fixture(fixtures.FIXTURES / f"{file}.json")
    bounces = [lesson.bounce(trace, negative) for negative in trace["negatives"][:3]]
    tried += [[name, b.what, f"✗ {b.reason}", "= unchanged" if b.unchanged else "→ CHANGED"] for b in bounces]
Table(["contract", "what is tried", "refused with", "digest"], tried)

# %% [markdown]
# ## Five sentences you will hear, and what is wrong with them

# %%
paper = five_chats()
snapshot = address_snapshot(paper.store, paper.allocator.snapshot())
first, third = (find_byte(snapshot, "A", 3, layer, "K", 0, 0) for layer in (0, 2))
print(f"'A block is an address.'            row 3 of block {first.physical_ref.physical_block_id} is byte "
      f"{first.byte_offset:,} in layer 0, byte {third.byte_offset:,} in layer 2")

a, b = (paper.rows(chat)[0][:, :, :32] for chat in "AC")
print(f"'Tokens match, so K/V match.'       Anna's 32 tokens are Clara's; K/V equal: {torch.equal(a, b)}")

paper.leave("E")
kept = physical_state(paper.allocator.snapshot())["ownership"]["cached_locked_evictable"].value["evictable"]
print(f"'No references means free.'         Emma left; blocks with no reference that can still be found: {len(kept)}")

print(f"'All is cached, so no prefill.'     32 of 32 tokens cached, {ledger.tokens_skipped(2, 16, 32)} skipped: "
      "a logit needs a computed token")

live = paper.allocator.requests["B"]
tail, filled = index_of(live.tables[0][-1]), paper.memory.length("B")
beyond = find_byte(snapshot, "B", filled, 0, "K", 0, 0)
print(f"'The memory is there, so it is K/V.' row {filled % 16} of Ben's last block: "
      f"{paper.store.k[0][0, tail, filled % 16, 0, 0].item()}, and the translator says {beyond.refused}")

# %% [markdown]
# ## The same on a larger model
#
# SmolLM2-135M writes better English. Anna talks about a film, Ben about a fish market. With ownership off, we saw
# Anna's film become *"The Fish Market"*. Get the model once with `python -m kvlab get-model`, set the switch to `True`,
# run the cell. Its output is not stored and not compared.

# %%
WITH_SMOLLM2 = False

if WITH_SMOLLM2:
    torch.set_num_threads(4)
    large, words = load_model("smollm2")
    head = "On a rainy Sunday in a small town by the sea there is, as everybody who has lived there knows,"
    for off in ("", "ownership", "execution_reuse"):
        world = Chats(large, words, off=off, num_blocks=32)
        world.ask("A", head)
        world.go_on("A", " only one thing to do: go to the cinema. The film")
        world.branch_at("A", "B", len(words.encode(head)), " a fish market, and the fish")
        world.speak("A", "B", tokens=12)
        print(f"{off or 'nothing'} off\n  Anna:{world.reply('A')!r}\n  Ben: {world.reply('B')!r}")

# %% [markdown]
# ## What you take with you
#
# Where is your conversation? In rows of K and V, and in five answers about them. In this order:
#
# 1. Somebody has an intent: tokens to keep, chats to run, a declared layout.
# 2. The memory validates it and changes its state, in one transaction.
# 3. It hands back a receipt: a match, an allocation, a release.
# 4. Only then may the scheduler decide the next thing.
#
# | This contract | hands on |
# |---|---|
# | identity | *may be read*, with the facts that were compared → to the index's caller |
# | index | which blocks, and how many rows of them may be used → to ownership |
# | ownership | handles, an id and a generation, and a table of them → to address |
# | address | the byte → to attention |
# | execution reuse | the row that one exact pass would give → to the next layer, and to your text |
#
# **Scope.** This course changes where K and V live, and skips what was computed before. It never drops old rows to save
# room: the allocator has no operation for it.
#
# **Try it.** Put David before Emma and switch the index off: do anybody's words change, and what does the index's check
# say? Give Clara's adapter `scale=0.2`, and read twice. Reserve 56 tokens a rectangle instead of 512 (`ROOM, MOST = 36,
# 56`): who is refused now, and when?
#
# **The next question.** Clara's tokens were Anna's tokens, and her rows were not. *Same tokens, so same K and V?*
# Lesson 2.
