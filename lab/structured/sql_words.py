# ruff: noqa: E501 - a template or a word list is one line
"""The tables, columns and values that the SQL questions are about."""

from __future__ import annotations

from dataclasses import dataclass

from lab.structured.wording import several
from lab.structured.words import KINDS


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its kind of value, or for a number the range."""

    name: str
    kind: str
    low: int = 0
    high: int = 0

    @property
    def is_number(self) -> bool:
        return not self.kind

    @property
    def words(self) -> str:
        """The name as a question says it; what is counted is a number of things."""
        counted = self.is_number and (self.name.endswith("s") or self.name in ("staff", "crew"))
        return ("number of " if counted else "") + self.name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Table:
    """A table (a plural noun), the noun for one row, and its columns; the first column names a row."""

    name: str
    single: str
    columns: tuple[Column, ...]


VALUES: dict[str, tuple[str, ...]] = {
    **{kind: KINDS[kind] for kind in ("city", "country", "colour", "weekday", "month", "subject", "sport", "job")},
    "department": several("Sales Finance Legal Support Design Marketing Research Security Logistics Training"),
    "genre": several("drama comedy horror fantasy mystery romance poetry travel jazz rock folk pop"),
    "brand": several("Nova Orbit Falcon Zenith Lumen Apex Tundra Vertex Solara Kestrel Borea Quanta"),
    "status": several("open closed pending paid shipped active cancelled new delayed"),
    "material": several("wood steel glass cotton leather plastic wool silk stone paper"),
    "level": several("basic standard premium advanced expert junior senior"),
    "language": several("English French Spanish German Italian Polish Hindi Arabic Korean Greek"),
    "cuisine": several("Thai Indian French Greek Mexican Korean Turkish Italian Chinese Spanish"),
    "breed": several("beagle poodle collie terrier boxer husky spaniel corgi"),
}

_TABLES = """
employees employee name department=department city=city salary=20000-90000 age=20-65 level=level hire_year=1990-2023
students student name city=city subject=subject age=16-30 grade=1-12 score=40-100
teachers teacher name subject=subject city=city age=25-65 salary=20000-80000
movies movie title genre=genre country=country language=language year=1960-2023 rating=1-10 length=70-200
books book title genre=genre language=language pages=80-900 year=1900-2023 price=5-80
songs song title genre=genre language=language length=100-400 year=1960-2023
cars car model brand=brand colour=colour price=5000-60000 year=1990-2023 weight=800-2500
bikes bike model brand=brand colour=colour price=100-4000 weight=7-20
phones phone model brand=brand colour=colour price=100-1500 memory=32-512 year=2010-2023
laptops laptop model brand=brand colour=colour price=300-3000 memory=4-64 weight=1-4
products product name brand=brand material=material colour=colour price=2-900 stock=0-500
shops shop name city=city country=country level=level size=20-900 staff=2-80
hotels hotel name city=city country=country rooms=10-400 stars=1-5 price=40-500
restaurants restaurant name cuisine=cuisine city=city seats=10-200 rating=1-10
museums museum name city=city country=country visitors=1000-90000 opening_year=1800-2020
players player name sport=sport country=country age=17-40 goals=0-60 height=150-215
teams team name sport=sport city=city wins=0-60 losses=0-60 points=0-120
matches match venue sport=sport city=city month=month weekday=weekday goals=0-9 visitors=100-80000
doctors doctor name city=city level=level age=28-70 patients=5-300
patients patient name city=city age=1-99 weight=30-140 visits=1-40
dogs dog name breed=breed colour=colour city=city age=1-16 weight=3-60
flights flight code city=city country=country status=status weekday=weekday seats=50-400 price=40-1500
trains train code city=city status=status weekday=weekday speed=80-320 seats=100-900
ships ship name country=country status=status length=20-400 crew=5-900 year=1950-2023
buildings building name city=city material=material height=10-800 floors=1-160 year=1850-2023
houses house street city=city material=material rooms=1-12 price=50000-900000 size=40-500
courses course title subject=subject level=level language=language hours=5-120 price=20-900
concerts concert title genre=genre city=city month=month visitors=50-50000 price=10-200
projects project name department=department status=status budget=1000-90000 hours=10-900
tickets ticket code status=status level=level department=department hours=1-90 price=5-300
gardens garden name city=city country=country size=50-9000 trees=1-900
rivers river name country=country length=50-4000 width=5-900 depth=1-80
mountains mountain name country=country height=500-8000 climbers=1-5000
farms farm name country=country size=5-900 cows=0-500 staff=1-60
artists artist name country=country genre=genre age=18-90 albums=1-30
paintings painting title colour=colour material=material year=1600-2020 price=100-90000 width=20-400
lamps lamp model brand=brand material=material colour=colour price=10-400 height=20-200
chairs chair model brand=brand material=material colour=colour price=15-600 weight=2-30
games game title genre=genre level=level language=language price=5-80 year=1985-2023 players=1-12
companies company name city=city country=country staff=5-9000 income=1000-90000 year=1900-2020
"""

_LINKS = """
orders order customers customer status=status month=month total=10-900 items=1-30 ; name city=city country=country age=18-90
loans loan members member status=status month=month days=1-60 fee=0-50 ; name city=city level=level age=12-90
lessons lesson tutors tutor subject=subject weekday=weekday hours=1-6 price=10-90 ; name city=city language=language age=20-70
bookings booking guests guest status=status month=month nights=1-21 price=40-2000 ; name country=country level=level age=18-90
repairs repair workers worker status=status weekday=weekday hours=1-40 cost=20-900 ; name city=city level=level age=18-65
reviews review readers reader language=language month=month stars=1-5 votes=0-900 ; name city=city country=country age=12-90
visits visit nurses nurse weekday=weekday status=status minutes=5-120 cost=10-300 ; name department=department city=city age=20-65
albums album singers singer genre=genre language=language year=1960-2023 songs=5-25 ; name country=country city=city age=18-80
articles article editors editor language=language month=month words=200-5000 views=10-90000 ; name department=department city=city age=20-70
deliveries delivery drivers driver city=city status=status weight=1-90 distance=1-900 ; name country=country level=level age=18-65
"""


def _column(text: str) -> Column:
    name, _, kind = text.partition("=")
    low, dash, high = kind.partition("-")
    return Column(name, "", int(low), int(high)) if dash else Column(name, kind or "name")


def _table(name: str, single: str, columns: list[str]) -> Table:
    return Table(name, single, tuple(_column(column) for column in columns))


def _link(line: str) -> tuple[Table, Table]:
    left, right = line.split(" ; ")
    child, child_one, parent, parent_one, *columns = left.split()
    return _table(child, child_one, columns), _table(parent, parent_one, right.split())


TABLES = tuple(_table(words[0], words[1], words[2:]) for words in map(str.split, _TABLES.strip().splitlines()))
LINKS = tuple(_link(line) for line in _LINKS.strip().splitlines())
