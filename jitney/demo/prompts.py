"""The thirty requests of the demo: short and long, code and verse, greedy and drawn, alone and with a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitney.client import Message, Options, Prompt

DESK = """You are the front desk of the Jitney Museum of Transport, which stands in an old tram depot by the river. \
Answer visitors in one or two friendly sentences, and only from these notes. The museum is open from Tuesday to \
Sunday, 10:00 to 18:00, and on Thursdays until 21:00; it is closed on Mondays and on the first of January. Tickets \
cost 9 euros, 5 euros for students and for people over 65; children under 12 come in free. The tram hall shows 23 \
trams from 1881 to 1997, and the oldest of them, a horse tram, gives rides every Saturday at 14:00. The bus hall \
holds the jitneys: small private buses of the 1910s, whose drivers stopped wherever somebody waved and squeezed in \
one more. The model railway runs on the hour. The cafe in the signal box serves soup, sandwiches and cake until half \
an hour before closing time. There are lifts to all floors, lockers for bags beside the entrance, and bicycle stands \
in the yard. Dogs may come into the yard, but not into the halls. Photographs are welcome, without flash. The nearest \
stop is Depot, lines 3 and 11."""

DESK_QUESTIONS = (
    "Are you open on Mondays?",
    "How much is it for two adults and a child of seven?",
    "What is a jitney?",
    "When can I ride the horse tram?",
    "May I bring my dog?",
    "Where can I leave my suitcase?",
    "Is there anything to eat?",
    "How do I get there by tram?",
)

PASSAGE = """The lighthouse at Farrow Point was built in 1864, after the third ship in ten years had broken up on the \
reef that the fishermen call the Comb. Its tower is 31 metres high, of grey granite that came by barge from the other \
side of the bay, since the road over the moor could not carry the blocks. For the first forty years the lamp burned \
rape oil and later paraffin, and two keepers wound a clockwork every four hours to turn the lens. They lived in the \
cottage at its foot with their families, three cows and a garden behind a wall that was higher than a man, because \
the wind took everything else. The log books, which are kept in the county archive, tell of a life that was mostly \
weather: fog for eleven days in March 1889, a gale in 1903 that threw stones through the lantern, and a summer so \
calm that the keepers rowed out to the reef and picked mussels from it. In the winter of 1911 the keeper's daughter, \
Ada Lindqvist, who was nineteen, kept the lamp alone for five nights while her father lay ill and his mate was cut \
off in the village by snow. Each night she climbed the 142 steps six times. On the fourth night the clockwork jammed, \
and she turned the lens by hand from dusk to dawn, counting aloud so as not to fall asleep, while a steamer with 88 \
people on board felt its way past the Comb. The company that owned the steamer sent her a silver watch; the authority \
that owned the lighthouse sent her father a letter which asked why the log had been written in another hand. Electric \
light came in 1936, by a cable from the village that broke so often that the oil lamp was kept ready for another \
twenty years. The last keeper left in 1979, when the light was made automatic, and the cottage stood empty until a \
group of people from the village bought it for a single pound. They mended the roof, pulled up the brambles and \
opened a small museum, in which the silver watch lies in a case of its own, and still runs. Today the light is a lamp \
no larger than a fist that can be seen for 18 miles. A computer in the capital watches over it. But on the second \
Saturday of every February, the people of the village switch it off for one minute, climb the 142 steps, and turn the \
old lens by hand."""

CODE = """def merge(intervals):
    intervals.sort()
    out = []
    for start, end in intervals:
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out"""

CHAT_TURNS = (
    "I have eggs, spinach, an onion and some old bread. What could I cook?",
    "That sounds good. How do I keep the eggs from sticking to the pan?",
    "And what could I drink with it?",
)
CHAT_OPTIONS = Options(max_tokens=48, endpoint="chat")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `cancel_after` tokens its caller loses interest."""

    name: str
    prompt: Prompt
    options: Options
    cancel_after: int = 0


def _user(text: str) -> Sequence[Message]:
    return (Message("user", text),)


def asks() -> list[Ask]:
    """Twenty-seven requests; a chat of `CHAT_TURNS` makes thirty."""
    greedy = [
        ("fact", "What is the capital of France?", 24),
        ("fact", "How many legs does a spider have?", 24),
        ("fact", "Why is the sky blue? Answer in one sentence.", 48),
        ("list", "List seven things to pack for a week in the mountains.", 120),
        ("list", "Name five rivers of Europe, one on each line.", 64),
        ("code", "Write a Python function that says whether a word is a palindrome.", 120),
        ("code", f"Explain in plain words what this Python function does:\n\n{CODE}", 110),
        ("translate", "Translate into French: Good morning, where is the railway station?", 40),
        ("translate", "Translate into Spanish: The train leaves at nine.", 40),
        ("summary", f"Summarise this text in three sentences.\n\n{PASSAGE}", 110),
        ("question", f"{PASSAGE}\n\nWho kept the lamp alone, and for how many nights?", 48),
        ("rewrite", "Make this more polite: Send me the report now.", 56),
        ("maths", "A train goes 60 km in 45 minutes. How fast is it in km per hour? Show the steps.", 110),
        ("letter", "Write a short letter that thanks a neighbour for watering the plants.", 110),
        ("compare", "What is the difference between a lake and a pond?", 80),
    ]
    drawn = [
        ("story", "Tell a story about a bus that was late for the first time.", 160, 11, 0.8),
        ("poem", "Write a poem of four lines about rain on a tin roof.", 64, 12, 0.9),
        ("names", "Invent three names for a bakery that is open at night.", 48, 13, 0.9),
    ]
    found = [Ask(kind, _user(text), Options(max_tokens=most, endpoint=kind)) for kind, text, most in greedy]
    for kind, text, most, seed, temperature in drawn:
        options = Options(max_tokens=most, endpoint=kind, seed=seed, temperature=temperature, top_p=0.95)
        found.append(Ask(kind, _user(text), options))
    for text in DESK_QUESTIONS:
        prompt = (Message("system", DESK), Message("user", text))
        found.append(Ask("desk", prompt, Options(max_tokens=56, endpoint="desk", tenant="museum")))
    cancelled = Options(max_tokens=160, endpoint="story", seed=14, temperature=0.8, ignore_eos=True)
    found.append(Ask("cancelled", _user("Tell a very long story about the sea."), cancelled, cancel_after=80))
    assert len(found) + len(CHAT_TURNS) == 30
    return found
