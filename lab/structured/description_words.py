# ruff: noqa: E501 - a template or a word list is one line
"""The domains that meaning representations describe: their attributes, values and how each is said.

Every phrase of a fact follows the subject "it".
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.structured.wording import several
from lab.structured.words import KINDS


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of thing.

    head: a noun phrase made of the first attributes. place: where it is, or empty. facts: for every
    further attribute, how a sentence that begins with "it" says it.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    values: dict[str, tuple[str, ...]]
    head: str
    place: str
    facts: dict[str, str]


_ADJECTIVES = several(
    "Golden;Silver;Old;Green;Blue;Red;Little;Grand;Quiet;Lucky;Royal;Hidden;Happy;White;Black;Broken;Early;Wild;"
    "Sunny;Misty;Crooked;Velvet;Copper;Amber"
)
_NOUNS = several(
    "Eagle;Lantern;Harbour;Garden;Anchor;Fox;Mill;Crown;Olive;Bridge;Swan;Oak;Kettle;Tower;Rose;Lion;Barn;Star;"
    "Compass;Maple;Falcon;Orchard;Pearl;River"
)
_AREAS = several(
    "riverside area;city centre;old town;harbour;university quarter;market square;station district;north end"
)
_NEAR = tuple(
    f"the {name}" for name in several("town hall;central park;opera house;bus station;cathedral;library;stadium;zoo")
)
_CITIES = KINDS["city"]

RESTAURANT = Domain(
    (tuple(f"The {word}" for word in _ADJECTIVES), _NOUNS),
    {
        "price": several("cheap;moderately priced;expensive;affordable"),
        "food": several("Italian;French;Chinese;Indian;Mexican;Thai;Greek;Japanese;Spanish;Turkish;Korean;Moroccan"),
        "type": several("restaurant;pub;cafe;bistro"),
        "area": _AREAS,
        "near": _NEAR,
        "rating": several("1 out of 5;2 out of 5;3 out of 5;4 out of 5;5 out of 5"),
        "familyFriendly": ("yes", "no"),
        "speciality": KINDS["food"],
        "closed": KINDS["weekday"],
    },
    "{price} {food} {type}",
    "in the {area}",
    {
        "near": "[is close to|is near|lies next to] {near}",
        "rating": "[has a customer rating of|is rated|has a rating of] {rating}",
        "familyFriendly=yes": "[is family friendly|welcomes children|is a good place for families]",
        "familyFriendly=no": "[is not family friendly|does not welcome children|is not a place for families]",
        "speciality": "[is known for its|is famous for its|serves very good] {speciality}",
        "closed": "[is closed on {closed}s|does not open on {closed}s|stays closed every {closed}]",
    },
)
HOTEL = Domain(
    (tuple(f"Hotel {word}" for word in _ADJECTIVES), _NOUNS),
    {
        "stars": several("two-star;three-star;four-star;five-star"),
        "style": several("family;business;beach;boutique;spa;country"),
        "city": _CITIES,
        "rooms": tuple(str(number) for number in range(12, 180, 4)),
        "price": tuple(str(number) for number in range(45, 320, 5)),
        "breakfast": ("included", "not included"),
        "near": _NEAR,
        "pets": ("allowed", "not allowed"),
        "wifi": ("free", "paid"),
    },
    "{stars} {style} hotel",
    "in {city}",
    {
        "rooms": "[has|offers] {rooms} rooms",
        "price": "[costs|charges] {price} euros [per|a] night",
        "breakfast=included": "[includes breakfast in the price|serves breakfast at no extra cost]",
        "breakfast=not included": "[does not include breakfast|charges extra for breakfast]",
        "near": "[is close to|stands near|lies next to] {near}",
        "pets=allowed": "[allows pets|welcomes pets]",
        "pets=not allowed": "[does not allow pets|does not accept pets]",
        "wifi=free": "[has free wifi|offers wifi for free]",
        "wifi=paid": "[asks guests to pay for wifi|has wifi for a fee]",
    },
)
MUSEUM = Domain(
    (
        tuple(
            f"{word} Museum" for word in ("City", "National", "Open", "House", "Royal", "Modern", "Island", "Valley")
        ),
        tuple(
            f"of {word}"
            for word in several("Art;History;Science;Design;Music;Toys;Glass;Ships;Trains;Photography;Stamps;Clocks")
        ),
    ),
    {
        "size": several("small;large;well known;new;popular;quiet"),
        "owner": several("public;private"),
        "city": _CITIES,
        "opened": tuple(str(year) for year in range(1861, 2020, 3)),
        "ticket": tuple(str(price) for price in range(3, 31)),
        "closed": KINDS["weekday"],
        "tours": several("English;French;Spanish;German;Italian;Polish"),
        "cafe": ("yes", "no"),
        "objects": tuple(str(count) for count in range(150, 5000, 50)),
    },
    "{size} {owner} museum",
    "in {city}",
    {
        "opened": "[opened in|was founded in|has been open since] {opened}",
        "ticket": "[charges {ticket} euros for a ticket|sells tickets for {ticket} euros]",
        "closed": "[is closed on {closed}s|does not open on {closed}s|stays closed every {closed}]",
        "tours": "[offers|gives|has] guided tours in {tours}",
        "cafe=yes": "[has a cafe|has its own cafe]",
        "cafe=no": "[does not have a cafe|has no cafe]",
        "objects": "[shows|displays|holds] {objects} objects",
    },
)
PRODUCT = Domain(
    (several("Nova;Orbit;Zenith;Lumen;Apex;Tundra;Vertex;Solara;Borea;Quanta;Kestrel;Rivo;Altra;Mondo"),
     tuple(f"{letter}{number}" for letter in "XSTGMQ" for number in (1, 2, 5, 7, 10, 20, 50, 80, 300))),
    {
        "colour": KINDS["colour"],
        "product": several("backpack;desk lamp;electric kettle;speaker;keyboard;office chair;blender;toaster;suitcase;camera;monitor;fan;watch"),
        "material": several("steel;plastic;leather;aluminium;wood;glass;cotton"),
        "weight": tuple(f"{number} {unit}" for unit, top in (("grams", 950), ("kilos", 12)) for number in range(2 if top < 20 else 150, top, 1 if top < 20 else 50)),
        "price": tuple(str(price) for price in range(9, 400, 5)),
        "warranty": several("one year;two years;three years;five years;six months"),
        "rating": tuple(f"{stars} stars" for stars in ("2", "2.5", "3", "3.5", "4", "4.5", "5")),
        "waterproof": ("yes", "no"),
    },
    "{colour} {product}",
    "made of {material}",
    {
        "weight": "[weighs|has a weight of] {weight}",
        "price": "[costs {price} dollars|is sold for {price} dollars|has a price of {price} dollars]",
        "warranty": "[comes with a warranty of {warranty}|has a warranty of {warranty}]",
        "rating": "[has a rating of|is rated|has an average rating of] {rating}",
        "waterproof=yes": "[is waterproof|can get wet safely]",
        "waterproof=no": "[is not waterproof|must not get wet]",
    },
)  # fmt: skip
FILM = Domain(
    (tuple(f"The {word}" for word in several("Last;Silent;Long;Second;Lost;Final;Secret;Empty;Frozen;Distant;Golden;Broken")),
     several("Winter;Letter;Road;Island;Promise;Witness;Garden;Train;Summer;Mirror;Signal;Harvest;Crossing;Voyage")),
    {
        "language": several("French;Italian;Spanish;Korean;Japanese;Danish;Polish;Indian;English;German"),
        "genre": several("comedy;drama;thriller;romance;western;documentary;horror film;mystery"),
        "year": tuple(str(year) for year in range(1962, 2024)),
        "director": tuple(f"{first} {last}" for first in several("Anna;Paul;Mei;Hugo;Clara;Ivan;Rosa;Leo") for last in several("Rossi;Kim;Olsen;Vega;Khan;Moore;Fisher;Nguyen")),
        "length": tuple(str(minutes) for minutes in range(78, 190, 2)),
        "setting": _CITIES,
        "rating": tuple(f"{stars} out of 10" for stars in range(3, 11)),
        "children": ("suitable", "not suitable"),
    },
    "{language} {genre}",
    "from {year}",
    {
        "director": "[was directed by|was made by|is a work of] {director}",
        "length": "[lasts {length} minutes|runs for {length} minutes|is {length} minutes long]",
        "setting": "[is set in|takes place in] {setting}",
        "rating": "[has a rating of|is rated|has a score of] {rating}",
        "children=suitable": "[is suitable for children|can be watched by children]",
        "children=not suitable": "[is not suitable for children|is not meant for children]",
    },
)  # fmt: skip
DOMAINS = {"restaurant": RESTAURANT, "hotel": HOTEL, "museum": MUSEUM, "product": PRODUCT, "film": FILM}
