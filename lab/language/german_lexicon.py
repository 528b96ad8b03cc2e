"""The bilingual lexicon of `translation`: German forms with their English.

Only strong nouns are listed, so case shows in the article and adjective alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.language.words import rows


@dataclass(frozen=True, slots=True)
class Noun:
    """A noun with gender m, f or n and its plurals."""

    german: str
    gender: str
    english: str
    german_plural: str
    english_plural: str


@dataclass(frozen=True, slots=True)
class Verb:
    """A transitive verb with the forms sentences need, and the noun class its object comes from."""

    infinitive: str
    present: str
    past: str
    past_plural: str
    participle: str
    english: str
    english_third: str
    english_past: str
    objects: str


def _nouns(table: str) -> list[Noun]:
    return [Noun(*row) for row in rows(table)]


PEOPLE = _nouns("""
Lehrer|m|teacher|Lehrer|teachers
Lehrerin|f|teacher|Lehrerinnen|teachers
Arzt|m|doctor|Ärzte|doctors
Ärztin|f|doctor|Ärztinnen|doctors
Koch|m|cook|Köche|cooks
Bäcker|m|baker|Bäcker|bakers
Fahrer|m|driver|Fahrer|drivers
Maler|m|painter|Maler|painters
Malerin|f|painter|Malerinnen|painters
Richter|m|judge|Richter|judges
Richterin|f|judge|Richterinnen|judges
Freund|m|friend|Freunde|friends
Freundin|f|friend|Freundinnen|friends
Bruder|m|brother|Brüder|brothers
Schwester|f|sister|Schwestern|sisters
Vater|m|father|Väter|fathers
Mutter|f|mother|Mütter|mothers
Sohn|m|son|Söhne|sons
Tochter|f|daughter|Töchter|daughters
Gast|m|guest|Gäste|guests
Schüler|m|pupil|Schüler|pupils
Gärtner|m|gardener|Gärtner|gardeners
Verkäufer|m|salesman|Verkäufer|salesmen
Verkäuferin|f|saleswoman|Verkäuferinnen|saleswomen
Ingenieur|m|engineer|Ingenieure|engineers
Ingenieurin|f|engineer|Ingenieurinnen|engineers
Trainer|m|coach|Trainer|coaches
Frau|f|woman|Frauen|women
Mann|m|man|Männer|men
Bürgermeister|m|mayor|Bürgermeister|mayors
Minister|m|minister|Minister|ministers
Ministerin|f|minister|Ministerinnen|ministers
Künstler|m|artist|Künstler|artists
Künstlerin|f|artist|Künstlerinnen|artists
Sänger|m|singer|Sänger|singers
Sängerin|f|singer|Sängerinnen|singers
Onkel|m|uncle|Onkel|uncles
Tante|f|aunt|Tanten|aunts
Forscher|m|researcher|Forscher|researchers
Forscherin|f|researcher|Forscherinnen|researchers
""")
ANIMALS = _nouns("""
Hund|m|dog|Hunde|dogs
Katze|f|cat|Katzen|cats
Pferd|n|horse|Pferde|horses
Vogel|m|bird|Vögel|birds
Kuh|f|cow|Kühe|cows
Fisch|m|fish|Fische|fish
Maus|f|mouse|Mäuse|mice
Ziege|f|goat|Ziegen|goats
Schaf|n|sheep|Schafe|sheep
Ente|f|duck|Enten|ducks
Huhn|n|chicken|Hühner|chickens
Fuchs|m|fox|Füchse|foxes
Esel|m|donkey|Esel|donkeys
Kaninchen|n|rabbit|Kaninchen|rabbits
""")
THINGS = _nouns("""
Hut|m|hat|Hüte|hats
Tisch|m|table|Tische|tables
Stuhl|m|chair|Stühle|chairs
Lampe|f|lamp|Lampen|lamps
Uhr|f|clock|Uhren|clocks
Fahrrad|n|bicycle|Fahrräder|bicycles
Auto|n|car|Autos|cars
Boot|n|boat|Boote|boats
Schlüssel|m|key|Schlüssel|keys
Tasche|f|bag|Taschen|bags
Mantel|m|coat|Mäntel|coats
Kleid|n|dress|Kleider|dresses
Schuh|m|shoe|Schuhe|shoes
Hemd|n|shirt|Hemden|shirts
Telefon|n|telephone|Telefone|telephones
Computer|m|computer|Computer|computers
Kamera|f|camera|Kameras|cameras
Spiegel|m|mirror|Spiegel|mirrors
Teppich|m|carpet|Teppiche|carpets
Koffer|m|suitcase|Koffer|suitcases
Geige|f|violin|Geigen|violins
Klavier|n|piano|Klaviere|pianos
Bild|n|picture|Bilder|pictures
Flasche|f|bottle|Flaschen|bottles
Teller|m|plate|Teller|plates
Messer|n|knife|Messer|knives
Regal|n|shelf|Regale|shelves
Decke|f|blanket|Decken|blankets
""")
FOODS = _nouns("""
Apfel|m|apple|Äpfel|apples
Birne|f|pear|Birnen|pears
Kuchen|m|cake|Kuchen|cakes
Suppe|f|soup|Suppen|soups
Salat|m|salad|Salate|salads
Ei|n|egg|Eier|eggs
Kartoffel|f|potato|Kartoffeln|potatoes
Tomate|f|tomato|Tomaten|tomatoes
Brötchen|n|roll|Brötchen|rolls
Orange|f|orange|Orangen|oranges
Zwiebel|f|onion|Zwiebeln|onions
Wurst|f|sausage|Würste|sausages
Pfannkuchen|m|pancake|Pfannkuchen|pancakes
""")
TEXTS = _nouns("""
Brief|m|letter|Briefe|letters
Buch|n|book|Bücher|books
Bericht|m|report|Berichte|reports
Zeitung|f|newspaper|Zeitungen|newspapers
Gedicht|n|poem|Gedichte|poems
Vertrag|m|contract|Verträge|contracts
Rede|f|speech|Reden|speeches
Artikel|m|article|Artikel|articles
Nachricht|f|message|Nachrichten|messages
Roman|m|novel|Romane|novels
Geschichte|f|story|Geschichten|stories
Lied|n|song|Lieder|songs
""")
BUILDINGS = _nouns("""
Haus|n|house|Häuser|houses
Brücke|f|bridge|Brücken|bridges
Schule|f|school|Schulen|schools
Kirche|f|church|Kirchen|churches
Turm|m|tower|Türme|towers
Bahnhof|m|station|Bahnhöfe|stations
Museum|n|museum|Museen|museums
Krankenhaus|n|hospital|Krankenhäuser|hospitals
Fabrik|f|factory|Fabriken|factories
Hotel|n|hotel|Hotels|hotels
Theater|n|theatre|Theater|theatres
Straße|f|street|Straßen|streets
Garten|m|garden|Gärten|gardens
Bibliothek|f|library|Bibliotheken|libraries
""")
OBJECTS = {
    "person": PEOPLE,
    "animal": ANIMALS,
    "thing": THINGS,
    "food": FOODS,
    "text": TEXTS,
    "building": BUILDINGS,
}

VERBS = [
    Verb(*row)
    for row in rows("""
kaufen|kauft|kaufte|kauften|gekauft|buy|buys|bought|thing
verkaufen|verkauft|verkaufte|verkauften|verkauft|sell|sells|sold|thing
suchen|sucht|suchte|suchten|gesucht|look for|looks for|looked for|thing
finden|findet|fand|fanden|gefunden|find|finds|found|thing
tragen|trägt|trug|trugen|getragen|carry|carries|carried|thing
reparieren|repariert|reparierte|reparierten|repariert|repair|repairs|repaired|thing
holen|holt|holte|holten|geholt|fetch|fetches|fetched|thing
verlieren|verliert|verlor|verloren|verloren|lose|loses|lost|thing
bezahlen|bezahlt|bezahlte|bezahlten|bezahlt|pay for|pays for|paid for|thing
malen|malt|malte|malten|gemalt|paint|paints|painted|animal
füttern|füttert|fütterte|fütterten|gefüttert|feed|feeds|fed|animal
sehen|sieht|sah|sahen|gesehen|see|sees|saw|animal
fangen|fängt|fing|fingen|gefangen|catch|catches|caught|animal
fotografieren|fotografiert|fotografierte|fotografierten|fotografiert|photograph|photographs|photographed|building
essen|isst|aß|aßen|gegessen|eat|eats|ate|food
kochen|kocht|kochte|kochten|gekocht|cook|cooks|cooked|food
bestellen|bestellt|bestellte|bestellten|bestellt|order|orders|ordered|food
probieren|probiert|probierte|probierten|probiert|try|tries|tried|food
lesen|liest|las|lasen|gelesen|read|reads|read|text
schreiben|schreibt|schrieb|schrieben|geschrieben|write|writes|wrote|text
übersetzen|übersetzt|übersetzte|übersetzten|übersetzt|translate|translates|translated|text
vergessen|vergisst|vergaß|vergaßen|vergessen|forget|forgets|forgot|text
prüfen|prüft|prüfte|prüften|geprüft|check|checks|checked|text
besuchen|besucht|besuchte|besuchten|besucht|visit|visits|visited|building
bauen|baut|baute|bauten|gebaut|build|builds|built|building
zeichnen|zeichnet|zeichnete|zeichneten|gezeichnet|draw|draws|drew|building
öffnen|öffnet|öffnete|öffneten|geöffnet|open|opens|opened|building
kennen|kennt|kannte|kannten|gekannt|know|knows|knew|person
fragen|fragt|fragte|fragten|gefragt|ask|asks|asked|person
treffen|trifft|traf|trafen|getroffen|meet|meets|met|person
hören|hört|hörte|hörten|gehört|hear|hears|heard|person
grüßen|grüßt|grüßte|grüßten|gegrüßt|greet|greets|greeted|person
""")
]

# Stem and English; the stems take plain endings (no dunkel, teuer or hoch).
ADJECTIVES = rows("""
alt|old
neu|new
klein|small
groß|big
schön|beautiful
billig|cheap
schwer|heavy
leicht|light
bekannt|well-known
interessant|interesting
seltsam|strange
einfach|simple
""")
COLOURS = rows("rot|red\nblau|blue\ngrün|green\nweiß|white\nschwarz|black\nbraun|brown\ngelb|yellow\ngrau|grey")
PERSON_ADJECTIVES = rows("""
alt|old
jung|young
freundlich|friendly
müde|tired
klug|clever
nett|nice
fleißig|hard-working
berühmt|famous
ruhig|quiet
reich|rich
arm|poor
streng|strict
""")
FITTING = {
    "person": PERSON_ADJECTIVES,
    "animal": rows("alt|old\njung|young\nklein|small\ngroß|big\nwild|wild\nruhig|quiet\nbraun|brown\nweiß|white"),
    "thing": ADJECTIVES + COLOURS,
    "food": rows("frisch|fresh\nwarm|warm\nkalt|cold\ngroß|big\nklein|small\ngut|good\nbillig|cheap"),
    "text": rows("lang|long\nkurz|short\nneu|new\nalt|old\ngut|good\ninteressant|interesting\nwichtig|important"),
    "building": rows("alt|old\nneu|new\ngroß|big\nklein|small\nschön|beautiful\nbekannt|well-known\nmodern|modern"),
}

# German with its preposition and contraction, English.
PLACES = rows("""
im Park|in the park
in der Stadt|in the city
auf dem Markt|at the market
am Bahnhof|at the station
in der Schule|at school
im Garten|in the garden
am See|by the lake
im Wald|in the forest
in der Küche|in the kitchen
im Büro|in the office
am Strand|on the beach
im Hafen|in the harbour
auf dem Land|in the country
in einem Dorf|in a village
in Berlin|in Berlin
in Hamburg|in Hamburg
in Wien|in Vienna
in München|in Munich
in Köln|in Cologne
in Zürich|in Zurich
""")
PAST_TIMES = rows("""
gestern|yesterday
gestern Abend|yesterday evening
letzte Woche|last week
letztes Jahr|last year
am Montag|on Monday
am Freitag|on Friday
am Sonntag|on Sunday
vor zwei Tagen|two days ago
vor drei Jahren|three years ago
im Sommer|in summer
im Winter|in winter
im März|in March
im Oktober|in October
""")
PRESENT_TIMES = rows("""
heute|today
jeden Tag|every day
oft|often
manchmal|sometimes
am Abend|in the evening
am Wochenende|at the weekend
jeden Morgen|every morning
immer|always
""")
FUTURE_TIMES = rows("""
morgen|tomorrow
nächste Woche|next week
nächstes Jahr|next year
am Dienstag|on Tuesday
am Samstag|on Saturday
heute Abend|this evening
bald|soon
im Mai|in May
""")
NUMBERS = rows(
    "zwei|two\ndrei|three\nvier|four\nfünf|five\nsechs|six\nsieben|seven\nacht|eight\nzehn|ten\nzwölf|twelve"
)

# Intransitive: past singular, past plural, present, English past, English third person, infinitive pair.
ACTIONS = rows("""
arbeitete|arbeiteten|arbeitet|worked|works|arbeiten|work
wartete|warteten|wartet|waited|waits|warten|wait
schlief|schliefen|schläft|slept|sleeps|schlafen|sleep
sang|sangen|singt|sang|sings|singen|sing
spielte|spielten|spielt|played|plays|spielen|play
tanzte|tanzten|tanzt|danced|dances|tanzen|dance
lernte|lernten|lernt|studied|studies|lernen|study
lachte|lachten|lacht|laughed|laughs|lachen|laugh
saß|saßen|sitzt|sat|sits|sitzen|sit
""")
# Clauses after weil or obwohl (verb last), as a main clause, and in English.
REASONS = rows("""
das Wetter schlecht war|the weather was bad
das Wetter schön war|the weather was nice
es stark regnete|it was raining heavily
es sehr kalt war|it was very cold
der Zug zu spät kam|the train was late
die Straße gesperrt war|the road was closed
das Museum geschlossen war|the museum was closed
die Preise hoch waren|prices were high
es schon dunkel war|it was already dark
niemand zu Hause war|nobody was at home
das Geld fehlte|the money was missing
die Arbeit fertig war|the work was finished
""")
MODALS = rows("""
muss|müssen|must|has to|have to
will|wollen|want|wants to|want to
kann|können|can|can|can
darf|dürfen|may|may|may
soll|sollen|should|should|should
möchte|möchten|would like|would like to|would like to
""")
FEELINGS = rows("""
müde|tired
glücklich|happy
zufrieden|satisfied
sehr traurig|very sad
krank|ill
überrascht|surprised
ein wenig nervös|a little nervous
sehr stolz|very proud
""")
