"""The vocabulary the structured categories share, and how a value of a kind is drawn.

A slot specification such as `item=food price=10-90 who=person` names a kind or a range for each slot.
"""

from __future__ import annotations

import random
from functools import cache

from lab.structured.wording import pick, several

WOMEN = several(
    "Anna Maria Clara Sofia Emma Julia Laura Nora Alice Grace Ruth Helen Irene Lucy Mia Olivia Paula Rosa Sarah "
    "Tina Vera Wendy Yuki Zoe Amira Bella Diana Elena Fiona Hannah Ivy Joan Kate Lena Priya Mei"
)
MEN = several(
    "Adam Ben Carl David Eric Frank George Henry Ivan Jack Karl Leo Mark Nick Oscar Paul Peter Ravi Sam Tom "
    "Victor Walter Hugo Amir Bruno Chen Daniel Felix Gavin Hassan Isaac Jonas Kevin Liam Max Noah"
)
PEOPLE = WOMEN + MEN
SURNAMES = several(
    "Adams Baker Clark Davis Evans Fisher Garcia Harris Irwin Jones Kim Lopez Miller Nguyen Olsen Parker Quinn "
    "Rossi Smith Taylor Usman Vega Walker Young Zhang Brown Carter Dixon Foster Green Hughes Khan Lewis Moore"
)
_FEMALE = frozenset(WOMEN)

KINDS: dict[str, tuple[str, ...]] = {
    "city": several(
        "Paris London Berlin Madrid Rome Oslo Vienna Dublin Lisbon Prague Athens Warsaw Tokyo Sydney Boston Denver "
        "Chicago Toronto Seattle Austin Cairo Lima Delhi Seoul Milan Geneva Bergen Porto Krakow Bristol"
    ),
    "country": several(
        "France Spain Italy Germany Norway Sweden Japan Brazil Canada Egypt India Kenya Mexico Peru Poland Portugal "
        "Greece Ireland Austria Denmark Chile Turkey Vietnam Morocco"
    ),
    "weekday": several("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "month": several("January February March April May June July August September October November December"),
    "colour": several("red blue green black white yellow grey brown orange purple silver pink"),
    "fruit": several("apples pears plums oranges lemons peaches mangoes melons cherries figs"),
    "things": several(
        "marbles stickers stamps cards coins shells books pencils balloons buttons beads toys magnets badges "
        "postcards comics crayons ribbons puzzles keys"
    ),
    "food": several(
        "pizza;pasta;soup;salad;curry;sushi;fried rice;grilled fish;roast chicken;noodles;pancakes;lasagna;"
        "tacos;dumplings;stew;burgers"
    ),
    "furniture": several("sofa;desk;lamp;bookshelf;armchair;dining table;wardrobe;bed frame;mirror;carpet"),
    "device": several(
        "laptop;printer;phone;tablet;camera;washing machine;dishwasher;heater;fridge;television;router;coffee machine;"
        "vacuum cleaner;microwave"
    ),
    "clothing": several("jacket;coat;shirt;dress;sweater;scarf;raincoat;suit;skirt;hat;hoodie;blazer"),
    "subject": several(
        "history physics chemistry biology geography algebra statistics music art French Spanish German "
        "economics philosophy"
    ),
    "sport": several("tennis football basketball volleyball hockey badminton rugby cricket baseball handball"),
    "job": several(
        "teacher;nurse;engineer;designer;accountant;chef;translator;manager;driver;editor;analyst;librarian;"
        "receptionist;technician"
    ),
    "animal": several("dog;cat;rabbit;parrot;hamster;turtle;pony;goat;goldfish;duck"),
    "clock": tuple(f"{hour}:{minute}" for hour in range(8, 21) for minute in ("00", "15", "30", "45")),
}


def person_forms(name: str) -> tuple[str, str, str]:
    """The pronouns of a first name: subject, possessive, object."""
    return ("she", "her", "her") if name in _FEMALE else ("he", "his", "him")


def full_name(rng: random.Random) -> str:
    """A first name and a surname."""
    return f"{pick(rng, PEOPLE)} {pick(rng, SURNAMES)}"


def people(rng: random.Random, count: int) -> list[str]:
    """Different first names."""
    return rng.sample(PEOPLE, count)


@cache
def _spec(text: str) -> tuple[tuple[str, str, int, int], ...]:
    found = []
    for entry in text.split():
        name, kind = entry.split("=")
        low, dash, high = kind.partition("-")
        found.append((name, "", int(low), int(high)) if dash else (name, kind, 0, 0))
    return tuple(found)


def draw_slots(rng: random.Random, spec: str, kinds: dict[str, tuple[str, ...]] = KINDS) -> dict[str, object]:
    """A value for every slot of the specification."""
    slots: dict[str, object] = {}
    for name, kind, low, high in _spec(spec):
        if not kind:
            slots[name] = low + int(rng.random() * (high - low + 1))
            continue
        value = pick(rng, kinds[kind])
        while value in slots.values():  # two cities of one text are two different cities
            value = pick(rng, kinds[kind])
        slots[name] = value
    return slots


def more_kinds(text: str) -> dict[str, tuple[str, ...]]:
    """Kinds written as lines of `kind: value;value`."""
    pairs = (line.split(": ") for line in text.strip().split("\n"))
    return {name: several(values) for name, values in pairs}
