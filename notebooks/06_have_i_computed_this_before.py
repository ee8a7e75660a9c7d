# %% [markdown]
# # Lesson 6 · Have I computed this before?
#
# **All 48 tokens are cached; why does it compute 16?**
#
# Anna's prompt has run. Now Ben sends the very same words. Every row of K and V that he needs is in memory, so you
# expect that nothing is computed. A server computes 16 tokens all the same. Is that a bug?
#
# You will try to compute nothing, on a real model, and see what comes of it. Then you meet the contract, watch it step
# by step, and try to break it. Run the cells from the top. You need no GPU and no download.

# %%
import torch
from IPython.display import display

from kvlab.execution.model import load_model
from kvlab.study import lesson, lesson_prefix
from kvlab.study.lesson import Comparison, PagedWorld, Question, Stills, Table
from kvlab.study.lesson_prefix import POLICIES, Server, share
from kvlab.study.lesson_prefix_rows import PrefixWorld, alone, apart, over_nothing, talk
from kvlab.study.prefix_walk import PrefixWalk
from kvlab.study.replay import Setting
from kvlab.study.replay_source import Source
from kvlab.views.stage import widget

torch.set_num_threads(1)  # so small a model runs best on one thread
device = "cuda" if torch.cuda.is_available() else "cpu"
model, tokenizer = load_model("austen", device=device)  # small, and in this repository

STORY = ("The two young ladies were walking in the garden before dinner, "
         "when they saw a gentleman coming up the road; and it was")
PROMPT = STORY + ' Mr. Darcy. "I am'
ids = tokenizer.encode(PROMPT)

print(len(ids), "tokens: three blocks of 16")

# %% [markdown]
# ## Naive answer 1: take all of it
#
# Anna runs first. Her three blocks are full, so they can be found. Then Ben takes all 48 rows, and the model is run
# over what is left of his prompt: nothing.

# %%
server = PrefixWorld(model, tokenizer, num_blocks=16)
anna = server.begin("Anna", PROMPT)
print(f"Anna: {anna.found} tokens found, {anna.computed} computed")
taken = server.take_everything("Ben", PROMPT)
print(f"Ben:  {taken} tokens taken, {len(ids) - taken} computed")

print(f"\nThe model over no rows:\n{over_nothing(model)}")

# %% [markdown]
# **There is nothing to make a word from.** The next word comes from the *logits* of the last token. Logits come from
# that token's hidden state, at the end of its way through all layers. The cache holds K and V of every layer. It
# holds no hidden state.
#
# ## Naive answer 2: feed the last token again
#
# So give the model one row to work on. The last token is known: run it once more, behind the 48 rows.

# %%
server.feed_again("Ben")
server.speak("Ben", tokens=14)
server.speak("Anna", tokens=14)
Comparison(Anna_says='"I am' + server.reply("Anna"), Ben_is_told='"I am' + server.reply("Ben"))

# %% [markdown]
# **Same question, another answer.** Ben's 49th row says *am* a second time. The model reads *I am am*, and goes on with
# *used*. No error, no warning. To get logits for token 47 you must compute token 47, at **its own place**.
#
# And its place is row 15 of block 2. That block is full, Anna reads it, and nobody may write there (lesson 5). So the
# third block is not taken at all: Ben gets a fresh one and computes its 16 tokens.

# %%
right = PrefixWorld(model, tokenizer, num_blocks=16)
begun = {name: right.begin(name, PROMPT) for name in ("Anna", "Ben")}
logits, words = alone(model, tokenizer, PROMPT, 14)
right.speak("Ben", tokens=14)

print("logits differ by less than 0.0001:", apart(logits, begun["Ben"].logits) < 1e-4)
print("Ben speaks as if alone:", right.reply("Ben") == words)
Table(["chat", "tokens", "found", "computed"],
      [[name, b.tokens, b.found, b.computed] for name, b in begun.items()])

# %% [markdown]
# ## Why does a 100 % hit still compute a block?
#
# Two rules, one after the other (vllm pull requests 11186 and 17999, sglang issue 21158, nano-vllm issue 144):
#
# 1. **One row must be computed**, so at most `48 - 1 = 47` tokens may be taken. That is the *cap*.
# 2. **A hit is whole blocks**, so 47 becomes 32.
#
# The 16 are the price of rule 2. There are four lengths, and none of them is "the" hit:
#
# | length | it says |
# |---|---|
# | *semantic* `S_sem` | how much of an equal computation was ever published |
# | *indexed* `S_indexed` | how much of it can be found now, in every cache group |
# | *cap* `S_cap` | how much may be taken, if logits are wanted |
# | *runtime* `S_runtime` | how much is really taken |
#
# One prompt, asked for in six ways. Look for the shortest of the three limits in each line:

# %%
Table(["what is asked", "prompt", "semantic", "indexed", "cap", "runtime", "computed"],
      [[what, n.prompt, n.semantic, n.indexed, n.cap, n.runtime, n.recompute]
       for what, n in lesson_prefix.four_lengths().items()])

# %% [markdown]
# `runtime <= min(semantic, indexed, cap) <= prompt`, always. Only somebody who wants no logits, such as a
# job that warms a cache, gets all 48.
#
# ## The contract: a name made of all that came before
#
# Who would find a block needs a name for it. The name of block `i` is a hash of three things: **the name of block
# `i - 1`**, the tokens of block `i`, and extra keys. So a name stands for the whole prompt up to there. Now change one
# word, at place 37: *it was* becomes *she was*.

# %%
LONG = PROMPT + " not a bad man, and he was very much in love with you, my dear"
EDIT = LONG.replace("it was", "she was")
long, edit = tokenizer.encode(LONG), tokenizer.encode(EDIT)
different = [n for n, (a, b) in enumerate(zip(long, edit, strict=True)) if a != b]
print("different tokens at:", different)

index = Server()
names = zip(index.keys(long), index.keys(edit), strict=True)
Table(["block", "its tokens", "name before", "name after", ""],
      [[n, "same" if long[16 * n : 16 * n + 16] == edit[16 * n : 16 * n + 16] else "changed",
        a[:8], b[:8], "= same" if a == b else "→ other"] for n, (a, b) in enumerate(names)])

# %% [markdown]
# Block 3 has the same tokens as before, and another name. **Why may it not be used?** Because its rows are others. Run
# both texts and compare the rows of K and V behind place 37, layer by layer:

# %%
pair = PagedWorld(model, tokenizer, num_blocks=12)
pair.read("it", LONG)
pair.read("she", EDIT)

layer = 0
table = []
for one, other in zip(pair.rows("it"), pair.rows("she"), strict=True):
    for n in range(one.shape[1]):
        same = (one[:, n, 38:] - other[:, n, 38:]).abs().amax(dim=(0, 2, 3)) < 1e-6
        table.append([layer, one.shape[2] - 38, int(same.sum())])
        layer += 1
Table(["layer", "rows behind place 37", "the same in both texts"], table)

# %% [markdown]
# In layer 0 a row depends on its token and its place alone. From layer 1 on it depends on **everything before it**.
# That is why the parent's name is part of the name. A hash of a block's own tokens would find block 3, and be wrong.
#
# ## Slow motion
#
# Anna runs and publishes. Ben starts with the same 48 tokens, and ends. Then Clara asks for the other text. A
# lookup is a walk: name by name, from the front, until one is missing. There are two cache groups, and a hit is one
# block in **each** of them.

# %%
walk = PrefixWalk(block_size=16, num_blocks=10, groups=2, tokenizer=tokenizer)
walk.start("Anna", ids)
walk.publish("Anna", ids)
walk.start("Ben", ids)
walk.publish("Ben", ids)
walk.release("Ben")
walk.lookup("Clara", edit)
recording = walk.record("The same 48 tokens, then another word", lesson_prefix.QUESTION)
titles = [frame.title for frame in recording.frames]
full = next(n for n, title in enumerate(titles) if title.startswith("32 of 48"))
Stills(recording.frame(full), recording.frame(len(titles) - 1))

# %% [markdown]
# The same frames move here. **Step with → and ←, play with space.**

# %%
stage = widget(recording, frame=full)
display(stage)

# %% [markdown]
# Every frame is there in words, too. This is where Clara's lookup ends:

# %%
print(recording.frame(len(titles) - 1).text())

# %% [markdown]
# Authorise first, then compare, then look. The order is in the log of each lookup, and nothing of the index has been
# read before the first two (lesson 2 says why):

# %%
match = walk.cache.lookup(walk.asker, "Ben", ids)
for n, step in enumerate(match.log, 1):
    print(n, step.replace("_", " "))
print("decision about the schedule:", match.receipt.policy_decision)

# %% [markdown]
# **What an engine does, and what we demand.** Two different things, so here they are side by side.
#
# | | vLLM v0.23.0 (observed in its source) | kvlab (the contract) |
# |---|---|---|
# | A block's name | hash of parent, tokens, extra keys | the same, and a witness of what it was made of |
# | One row is computed | always | only where logits are wanted |
# | Partial tails | not found: full blocks only | not found; a second design finds them, see below |
# | Equal blocks of one step | both stay, not merged | the same |
# | Given back at the end | tail first | in table order |
# | What a lookup leaves behind | a list of blocks | a sealed receipt; a stale one is refused |
#
# ## Predict
#
# A server has run a prompt of 66 tokens, and it is still there. Five other prompts come in. Blocks have 16 tokens, and
# each prompt wants logits. The machine runs when you press the button, and grades you.

# %%
quiz = lesson.Predictions([Question(**p) for p in lesson_prefix.PREDICTIONS], lesson_prefix.answers)
display(quiz)

# %% [markdown]
# Press the button before you read on. What follows gives it away.
#
# ## The reveal

# %%
Table(["the prompt", "tokens", "found", "computed", "fresh blocks a group"], lesson_prefix.reveal())

# %% [markdown]
# A change at the front costs everything. A change at the end costs a block. **Put what changes last.**
#
# ## Why only full blocks?
#
# A full block is never written again, so its name stays true (vllm issue 3942). A tail still grows. Its rows can be
# found all the same, by the article's second design: the name of a tail also says *how many rows* it has, and
# whoever finds it **copies** those rows, for the tail's owner goes on writing there. Both designs, run side by side. A
# has run 50 tokens: three full blocks and two rows.

# %%
Table(["what is asked", "design", "taken", "computed", "rows copied"], lesson_prefix.tails())

# %% [markdown]
# Partial tails save up to 15 tokens a request. They cost up to 15 more names to try in each lookup, and a copy. And a
# tail is found only while its owner **lives**: in the last two lines A has ended, and both designs find the same.
#
# Look at *A's first 48*: the second design copies 15 rows of the third block and computes one. There the 100 % hit
# costs 1 token instead of 16. That is what naive answer 2 wanted, and this is what it takes.
#
# ## What does a hit rate mean, and why can it be 0?
#
# The same 48 tokens have run, and their rows are there. Six ways to ask (vllm issues 54607 and 25780, sglang issue
# 11668):

# %%
Table(["asked", "tokens", "found"], lesson_prefix.zero_rates())

# %% [markdown]
# - **A clock, a user's name or a request id at the front** changes every name. At the end it changes none.
# - **A salt** is part of the first name. Another salt, another chain: that is its purpose.
# - **A prompt shorter than a block** has no full block. One of exactly 16 tokens has one, and needs its last row.
#
# And a rate of *what*? Ten users share an instruction of 16 tokens, and each brings 484 of his own:

# %%
by_requests, by_tokens = lesson_prefix.two_rates()
print(f"requests that found something: {by_requests:.0%}")
print(f"tokens that were found:        {by_tokens:.1%}")

# %% [markdown]
# Nine of ten requests hit, and almost everything is computed. Ask which of the two a dashboard shows. Only tokens are
# work.
#
# ## Usage falls to 0 %, and the cache still hits?
#
# Yes (vllm issues 12077, 5176 and 11072). A block that nobody uses goes to the free queue, and **keeps its rows and
# its name** until somebody takes it. A pool of 8 blocks, and the 50 tokens asked for again after each event:

# %%
Table(["event", "in use", "free, with a name", "free, without", "tokens found"],
      [[what, *pool.values(), found] for what, pool, found in lesson_prefix.idle()])

# %% [markdown]
# When A has ended, nothing is in use and 48 tokens are found. *Free* means: may be taken. It does not mean empty. So
# "usage" never tells how much can be found, and a full cache is no reason to worry: names cost no room that anybody
# else could use.
#
# ## Which block is evicted first?
#
# The block that has been free the longest: the front of the queue. So everything hangs on the order in which a chat
# gives its blocks back (llm-d-inference-sim issue 704, LMCache issue 443). A prompt of four blocks has ended in a pool
# of four, and somebody takes two:

# %%
Table(["who gives back", "free queue", "taken", "tokens still found", "orphans"],
      [[label, " ".join(map(str, e.queue)), " ".join(map(str, e.gone)), e.found, e.orphans]
       for policy, label in POLICIES.items() for e in [lesson_prefix.eviction(policy)]])

# %% [markdown]
# Head first: blocks 0 and 1 go, and blocks 2 and 3 are **orphans**. They have rows and names, and no walk from the
# front gets there any more. Tail first: what is left is a prefix, and all of it is found. The contract allows both,
# for no wrong row is read either way. Which is better is a matter of *policy*, and here the engine's is better.
#
# ## Two identical prompts in one step: shared?
#
# No (nano-vllm issue 219, vllm issue 7414). A block can be found when its rows are **written**. Two requests of one
# step ask before either has written anything:

# %%
Table(["who", "tokens found", "blocks in use", "names that had a block already"], lesson_prefix.at_once())

# %% [markdown]
# A and B compute the same 50 tokens, into blocks of their own. Then three names have two blocks each. They are not
# merged: a running request's table only grows, and a kernel may be reading it. C, one step later, finds the older ones.
#
# ## A hash collision: a stranger's rows?
#
# A name is a hash, and two prompts could have the same one (vllm issue 8229). With 256 bits nobody has seen it. With
# 32 bits anybody can make it. Here are two different blocks of 16 tokens, under two hashes:

# %%
Table(["hash", "name of the one block", "name of the other", ""],
      [[h, a, b, "→ equal" if a == b else "differ"] for h, a, b in lesson_prefix.collision()])

# %%
weak = lesson_prefix.weak_hash()
print("with witnesses:   ", lesson.bounce(weak, weak["negatives"][0]).reason)
print("without witnesses:", lesson_prefix.without_witness())

# %% [markdown]
# **A witness** is what a name was made of. It is compared on every hit, so an equal name alone opens nothing. And a
# **salt** keeps tenants apart on purpose: it is in the first block's name, so every name behind it is another.

# %%
salts = {salt or "no salt": index.keys(ids, salt=salt) for salt in (None, "anna", "ben")}
Table(["salt", "block 0", "block 1", "block 2"], [[s, *(k[:8] for k in keys)] for s, keys in salts.items()])

# %% [markdown]
# A salt is no password: it must come from someone you trust, and it must really reach the name. In one engine it did
# not, and nothing failed (ktransformers issue 2184, below).
#
# ## Failure lab
#
# Pick something forbidden. It is tried on a fresh machine, now. Look at the reason, and at the two digests.

# %%
lab = lesson.FailureLab(lesson_prefix.article())
display(lab)

# %% [markdown]
# All of them at once, with those of the second design and of weak hashes. Each is a few lines of JSON in
# `fixtures/loop6_*.json`. You can add your own.

# %%
everything = [(case.what, case.attempt()) for case in lesson_prefix.malformed()]
unchanged = sum(tried.before == tried.after for _, tried in everything)
print(f"{unchanged} of {len(everything)} refused, digest unchanged")
Table(["what is tried", "refused with"], [[what, f"✗ {tried.reason}"] for what, tried in everything])

# %% [markdown]
# Some of it has happened. Seven public bugs, played on this index with their smallest input:

# %%
Table(["public bug", "what people saw", "what holds here", "held"], lesson_prefix.bugs())

# %% [markdown]
# ## The same at work: turn after turn
#
# A chat sends its whole past with every turn. So a prefix cache is what makes a long chat affordable. Three turns with
# the model, and **what it said is found, too**: a chat that ends offers its answer's full blocks.

# %%
chat = PrefixWorld(model, tokenizer, num_blocks=32)
turns = talk(chat, STORY, [' Mr. Darcy. "I am', ' "And I," said Elizabeth, "', ' Mr. Bingley, "'], words=16)
chat.cache.check()
Table(["turn", "prompt tokens", "found", "computed", "hit rate"],
      [[n, b.tokens, b.found, b.computed, share(b.found, b.tokens)] for n, b in enumerate(turns, 1)])

# %% [markdown]
# Now three chats at once behind one instruction, replayed without a model. **Change the texts and run it again.**

# %%
HEAD = ("You are a patient and well bred governess. You answer every question about visits, letters, dinners and balls "
        "in one sentence, and you never speak ill of anybody who is not in the room. ")
CHATS = {
    "Anna": [("May I dance twice with him? ", "Once is polite, and twice is noticed. "),
             ("And three times? ", "Then you are engaged. "), ("To whom? ", "To him, my dear. ")],
    "Ben": [("Shall I write to her? ", "Not before her mother has called. "),
            ("She has called. ", "Then write, and be short. "), ("How short? ", "Shorter than this. ")],
    "Clara": [("May I dance twice with her? ", "Once is polite, and twice is noticed. "),
              ("It is my sister. ", "Then dance as often as you like. ")],
}


def at_work(setting, chats=CHATS):
    """Hit rate a turn, one request of each chat in turn."""
    return lesson_prefix.by_turn(lesson_prefix.written(tokenizer.encode, HEAD, chats), setting)


Table(["turn", "requests", "prompt tokens", "found", "hit rate"],
      [[turn, n, asked, found, share(found, asked)]
       for turn, n, asked, found in at_work(Setting("prefix", 16, 400))])

# %% [markdown]
# Later turns find more, as long as there is room. And with less room, under both policies?

# %%
small = []
for blocks in (400, 12, 9):
    for policy, label in POLICIES.items():
        rows = at_work(Setting("prefix", 16, blocks, policy=policy))
        small.append([blocks, label, share(sum(r[3] for r in rows), sum(r[2] for r in rows))])
Table(["blocks", "policy", "hit rate"], small)

# %% [markdown]
# As long as there is room, the policy does not matter. When there is none, blocks that are given back tail first leave
# more that can be found.
#
# **On real agents.** Put the path of a file of message lists below, in JSON or JSON lines; the tau-bench airline runs
# are such a file. It needs SmolLM2's tokenizer (`python -m kvlab get-model`). This cell's output is not stored and not
# compared.

# %% tags=["nbval-ignore-output"]
YOUR_FILE = None

if YOUR_FILE:
    source = Source(YOUR_FILE, tokenizer="smollm2", waves=50)
    for policy, label in POLICIES.items():
        real = lesson_prefix.by_turn(source.requests(source.open()), Setting("prefix", 16, 2_048, policy=policy))
        print(label, share(sum(r[3] for r in real), sum(r[2] for r in real)))
        display(Table(["turn", "requests", "prompt tokens", "found", "hit rate"],
                      [[*row, share(row[3], row[2])] for row in real]))
else:
    print("No file named: the three chats above stand in for it.")

# %% [markdown]
# We ran it on the whole file, 100 agents in waves of 50, 1,229 requests and 3,990,389 prompt tokens (measured; block
# size 16, one request in flight):
#
# | blocks | policy | first turns | eighth turns | all |
# |---|---|---|---|---|
# | 20,480 | kvlab (normative) | 96.8 % | 94.5 % | **94.8 %** |
# | 2,048 | kvlab (normative) | 96.8 % | 41.0 % | **51.4 %** |
# | 2,048 | vLLM v0.23.0 (source-observed) | 96.8 % | 41.0 % | **52.7 %** |
#
# Even a *first* turn finds almost everything: all agents begin with the same long instruction. And with a tenth of
# the room, later turns lose first, for their blocks have waited the longest when they are asked for again.
#
# **With a larger model.** SmolLM2-135M writes better English. Get it once with `python -m kvlab get-model`, set the
# switch to `True`, run the cell. Its output is not stored and not compared: it depends on your machine.

# %% tags=["nbval-ignore-output"]
WITH_SMOLLM2 = False

if WITH_SMOLLM2:
    torch.set_num_threads(4)
    large, its_tokenizer = load_model("smollm2", device=device)
    two = PrefixWorld(large, its_tokenizer, num_blocks=32)
    two.begin("Anna", PROMPT)
    ben = two.begin("Ben", PROMPT)
    two.speak("Ben", tokens=24)
    fresh, said = alone(large, its_tokenizer, PROMPT, 24)
    print(f"{ben.found} of {ben.tokens} tokens found, {ben.computed} computed")
    print(f"logits differ by {apart(fresh, ben.logits):.1e}; the same words: {two.reply('Ben') == said}")
    print(PROMPT + said)

# %% [markdown]
# ## What you take with you
#
# - One row must be computed, and a hit is whole blocks. So a 100 % hit of 48 tokens computes 16.
# - Semantic, indexed, cap, runtime: four lengths, and the runtime one is never the longest.
# - A name stands for everything before it. A change at the front changes all names, a change at the end one.
# - Free blocks keep their names. Blocks given back head first leave orphans.
# - Rows are found when they have been written. An equal name opens nothing by itself: witness and salt do.
#
# **Try it.** Put a clock at the front of `HEAD`, then at its end, and predict both hit rates. Ask `Server` for blocks
# of 32 tokens, then of 4: which hits get longer? Evict block 0 of a prompt and see what is left of it.
#
# **The next question.** Full blocks are found in steps of 16. A chain has no memory of its own: it hangs names on
# blocks that an allocator owns, and orphans happen. What if the index were a **tree** that finds any length, and owns
# what it finds? Lesson 7 asks whether that is just a faster dict. It takes from here what a hit means, the cap, and
# receipts that decide nothing.
