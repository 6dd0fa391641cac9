"""The thirty requests of the demo: short and long, code and verse, greedy and drawn, alone and with a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitney.client import Message, Options, Prompt

DESK = """You are the front desk of the Jitney Museum of Transport. Answer in one short sentence, from these notes.
- Opening hours: Tuesday to Sunday, 10:00 to 18:00, on Thursdays until 21:00. Closed on Mondays.
- Tickets: 9 euros, students and people over 65 5 euros, children under 12 free.
- A jitney is a small private bus of the 1910s, whose driver stopped wherever somebody waved.
- The horse tram of 1881 gives rides every Saturday at 14:00.
- The model railway runs on the hour.
- The cafe in the signal box serves soup, sandwiches and cake, until half an hour before closing time.
- Lockers for bags are beside the entrance, bicycle stands are in the yard, lifts go to all floors.
- Dogs may come into the yard, but not into the halls.
- Photographs are welcome, without flash.
- The nearest tram stop is Depot, lines 3 and 11."""

DESK_QUESTIONS = (
    "On which day is the museum closed?",
    "What does a ticket cost?",
    "What is a jitney?",
    "When does the horse tram give rides?",
    "May I bring my dog?",
    "Where are the lockers?",
    "What does the cafe serve?",
    "Which tram lines stop at Depot?",
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
        ("fact", "What does HTTP stand for?", 56),
        ("list", "Name the seven days of the week.", 72),
        ("list", "List seven things to pack for a week in the mountains.", 110),
        ("list", "Give three tips for sleeping well.", 110),
        ("code", "Write a Python function that says whether a word is a palindrome.", 110),
        ("code", f"Explain in plain words what this Python function does:\n\n{CODE}", 110),
        ("code", "Write a regular expression that matches an email address.", 80),
        ("translate", "Translate into French: Hello, how are you?", 24),
        ("rewrite", "Rewrite in the past tense: She walks to school and meets a friend.", 32),
        ("summary", f"Summarise this text in three sentences.\n\n{PASSAGE}", 110),
        ("question", f"{PASSAGE}\n\nWho kept the lamp alone, and for how many nights?", 48),
        ("explain", "What is photosynthesis?", 100),
        ("explain", "What is the difference between a lake and a pond?", 90),
        ("letter", "Write a short letter that thanks a neighbour for watering the plants.", 110),
    ]
    drawn = [
        ("story", "Tell a short story about a robot that learns to paint.", 128, 11, 0.8),
        ("poem", "Write a haiku about the sea.", 56, 12, 0.7),
        ("names", "Invent three names for a bakery that is open at night.", 48, 13, 0.9),
    ]
    found = [Ask(kind, _user(text), Options(max_tokens=most, endpoint=kind)) for kind, text, most in greedy]
    for kind, text, most, seed, temperature in drawn:
        options = Options(max_tokens=most, endpoint=kind, seed=seed, temperature=temperature, top_p=0.95)
        found.append(Ask(kind, _user(text), options))
    for text in DESK_QUESTIONS:
        prompt = (Message("system", DESK), Message("user", text))
        found.append(Ask("desk", prompt, Options(max_tokens=40, endpoint="desk", tenant="museum")))
    cancelled = Options(max_tokens=128, endpoint="story", seed=14, temperature=0.8, ignore_eos=True)
    found.append(Ask("cancelled", _user("Tell a very long story about the sea."), cancelled, cancel_after=64))
    assert len(found) + len(CHAT_TURNS) == 30
    return found
