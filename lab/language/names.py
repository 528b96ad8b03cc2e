"""People, invented places and firms, days and numbers: details that prompts give and answers must copy."""

from __future__ import annotations

import random

from lab.language.words import terms

WOMEN = terms(
    "Anna, Maria, Clara, Ruth, Nadia, Ingrid, Sofia, Leila, Emma, Olga, Helen, Priya, Yuki, Carmen, Judith, "
    "Alice, Greta, Monica, Fatima, Elena, Nora, Vera, Iris, Paula, Tessa, Wendy, Amara, Dora, Hanna, Lucia"
)
MEN = terms(
    "Peter, Daniel, Omar, Victor, Tomas, Samuel, Igor, Felix, Hugo, Marco, Ravi, Kenji, Pablo, Simon, Walter, "
    "Adam, Oscar, Louis, Karim, Anton, Jonas, Erik, Bruno, Colin, Martin, Leon, David, Nils, Ivan, George"
)
_FIRST_NAMES = WOMEN + MEN
SURNAMES = terms(
    "Berg, Castillo, Dunn, Ekman, Farrow, Gupta, Hale, Ivers, Jansen, Kowal, Lund, Moreau, Nash, Okafor, Petrov, "
    "Quinn, Rossi, Sato, Torres, Ulrich, Vance, Weber, Yilmaz, Zeller, Abbott, Brandt, Cole, Draper, Ellis, "
    "Fischer, Grant, Hughes, Keller, Lopez, Marsh, Novak, Olsen, Price, Reyes, Stone, Tanaka, Voss, Winter, "
    "Archer, Bishop, Carter"
)
TOWN_STARTS = terms(
    "Ash, Bram, Cal, Dun, El, Fern, Gar, Hol, Ister, Kel, Lor, Mar, Nor, Oak, Pel, Quin, Ros, Sel, Tarn, Ul, Ver, "
    "Wil, Yar, Zan, Birch, Corn, Drav, Falk, Glen, Hart, Kirk, Lind, Mill, Nev, Orl, Pren, Rav, Stan, Thorn, Wex"
)
TOWN_ENDS = terms(
    "ford, bury, field, ton, haven, mouth, wick, stead, dale, bridge, port, minster, grove, ham, crest, holm, by, "
    "more, well, gate"
)
FIRM_STARTS = terms(
    "Alpen, Baltic, Crest, Delta, Evergreen, Fal, Granite, Harbor, Ionic, Juniper, Kestrel, Lumen, Meridian, "
    "North, Orbit, Pine, Quartz, River, Silver, Tidal, Umber, Vector, Willow, Zenith, Amber, Copper"
)
FIRM_ENDS = terms(
    "Works, Foods, Labs, Motors, Textiles, Systems, Tools, Paper, Glass, Energy, Robotics, Shipping, Optics, "
    "Ceramics, Software"
)
WEEKDAYS = terms("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = terms("January, February, March, April, May, June, July, August, September, October, November, December")


def town(rng: random.Random) -> str:
    """An invented town."""
    return rng.choice(TOWN_STARTS) + rng.choice(TOWN_ENDS)


def firm(rng: random.Random) -> str:
    """An invented company."""
    return f"{rng.choice(FIRM_STARTS)} {rng.choice(FIRM_ENDS)}"


def first_name(rng: random.Random) -> str:
    """A first name of either sex."""
    return rng.choice(_FIRST_NAMES)


def two_first_names(rng: random.Random) -> tuple[str, str]:
    """Different first names, for two people in one text."""
    one, other = rng.sample(_FIRST_NAMES, 2)
    return one, other


def full_name(rng: random.Random) -> str:
    """First name and surname."""
    return f"{first_name(rng)} {rng.choice(SURNAMES)}"


def clock(rng: random.Random) -> str:
    """A time of day when people meet, on the half hour."""
    hour = rng.randint(9, 20)
    return f"{(hour - 1) % 12 + 1}{rng.choice((':00', ':30'))} {'am' if hour < 12 else 'pm'}"
