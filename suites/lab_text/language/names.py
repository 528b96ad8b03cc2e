"""People, invented places and firms, days and numbers: details that prompts give and answers must copy."""

from __future__ import annotations

import random

WOMEN = (
    "Anna Maria Clara Ruth Nadia Ingrid Sofia Leila Emma Olga Helen Priya Yuki Carmen Judith Alice "
    "Greta Monica Fatima Elena Nora Vera Iris Paula Tessa Wendy Amara Dora Hanna Lucia"
).split()
MEN = (
    "Peter Daniel Omar Victor Tomas Samuel Igor Felix Hugo Marco Ravi Kenji Pablo Simon Walter Adam "
    "Oscar Louis Karim Anton Jonas Erik Bruno Colin Martin Leon David Nils Ivan George"
).split()
SURNAMES = (
    "Berg Castillo Dunn Ekman Farrow Gupta Hale Ivers Jansen Kowal Lund Moreau Nash Okafor Petrov Quinn "
    "Rossi Sato Torres Ulrich Vance Weber Yilmaz Zeller Abbott Brandt Cole Draper Ellis Fischer Grant "
    "Hughes Keller Lopez Marsh Novak Olsen Price Reyes Stone Tanaka Voss Winter Archer Bishop Carter"
).split()
TOWN_STARTS = (
    "Ash Bram Cal Dun El Fern Gar Hol Ister Kel Lor Mar Nor Oak Pel Quin Ros Sel Tarn Ul Ver Wil Yar "
    "Zan Birch Corn Drav Falk Glen Hart Kirk Lind Mill Nev Orl Pren Rav Stan Thorn Wex"
).split()
TOWN_ENDS = (
    "ford bury field ton haven mouth wick stead dale bridge port minster grove ham crest holm by more "
    "well gate"
).split()
FIRM_STARTS = (
    "Alpen Baltic Crest Delta Evergreen Fal Granite Harbor Ionic Juniper Kestrel Lumen Meridian North "
    "Orbit Pine Quartz River Silver Tidal Umber Vector Willow Zenith Amber Copper"
).split()
FIRM_ENDS = (
    "Works|Foods|Labs|Motors|Textiles|Systems|Tools|Paper|Glass|Energy|Robotics|Shipping|Optics|Ceramics|Software"
).split("|")
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
RELATIVES = ("my sister", "my brother", "my cousin", "my neighbour", "my friend", "my uncle", "my aunt")


def town(rng: random.Random) -> str:
    """An invented town."""
    return rng.choice(TOWN_STARTS) + rng.choice(TOWN_ENDS)


def firm(rng: random.Random) -> str:
    """An invented company."""
    return f"{rng.choice(FIRM_STARTS)} {rng.choice(FIRM_ENDS)}"


def first_name(rng: random.Random) -> str:
    """A first name of either sex."""
    return rng.choice(WOMEN + MEN)


def full_name(rng: random.Random) -> str:
    """First name and surname."""
    return f"{first_name(rng)} {rng.choice(SURNAMES)}"


def person(rng: random.Random, role: str = "") -> dict[str, str]:
    """Slots for one person: {role}name, first, he, his, him."""
    woman = rng.random() < 0.5
    first = rng.choice(WOMEN if woman else MEN)
    words = ("she", "her", "her") if woman else ("he", "his", "him")
    slots = {"name": f"{first} {rng.choice(SURNAMES)}", "first": first}
    slots.update(zip(("he", "his", "him"), words, strict=True))
    return {role + slot: value for slot, value in slots.items()}


def date(rng: random.Random) -> str:
    """A day of a month, as in 12 May."""
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"


def clock(rng: random.Random) -> str:
    """A time of day on the half hour."""
    return f"{rng.randint(1, 12)}{rng.choice((':00', ':30'))} {rng.choice(('am', 'pm'))}"
