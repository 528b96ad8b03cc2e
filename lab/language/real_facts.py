"""Real facts for closed-book questions: countries, elements, planets, animals, works and months."""

from __future__ import annotations

from functools import cache

from lab.language.words import rows

Entity = dict[str, str]

_COUNTRIES = (
    "name|capital|currency|continent|language",
    """
France|Paris|euro|Europe|French
Germany|Berlin|euro|Europe|German
Italy|Rome|euro|Europe|Italian
Spain|Madrid|euro|Europe|Spanish
Portugal|Lisbon|euro|Europe|Portuguese
Austria|Vienna|euro|Europe|German
Greece|Athens|euro|Europe|Greek
Finland|Helsinki|euro|Europe|Finnish
Poland|Warsaw|zloty|Europe|Polish
Sweden|Stockholm|Swedish krona|Europe|Swedish
Norway|Oslo|Norwegian krone|Europe|Norwegian
Denmark|Copenhagen|Danish krone|Europe|Danish
Hungary|Budapest|forint|Europe|Hungarian
Romania|Bucharest|leu|Europe|Romanian
Iceland|Reykjavik|Icelandic krona|Europe|Icelandic
Ukraine|Kyiv|hryvnia|Europe|Ukrainian
Albania|Tirana|lek|Europe|Albanian
Estonia|Tallinn|euro|Europe|Estonian
Latvia|Riga|euro|Europe|Latvian
Lithuania|Vilnius|euro|Europe|Lithuanian
Japan|Tokyo|yen|Asia|Japanese
China|Beijing|renminbi|Asia|Mandarin Chinese
South Korea|Seoul|won|Asia|Korean
Thailand|Bangkok|baht|Asia|Thai
Vietnam|Hanoi|dong|Asia|Vietnamese
Indonesia|Jakarta|rupiah|Asia|Indonesian
Mongolia|Ulaanbaatar|tugrik|Asia|Mongolian
Iran|Tehran|rial|Asia|Persian
Bangladesh|Dhaka|taka|Asia|Bengali
Nepal|Kathmandu|Nepalese rupee|Asia|Nepali
Jordan|Amman|Jordanian dinar|Asia|Arabic
Saudi Arabia|Riyadh|riyal|Asia|Arabic
Egypt|Cairo|Egyptian pound|Africa|Arabic
Morocco|Rabat|Moroccan dirham|Africa|Arabic
Kenya|Nairobi|Kenyan shilling|Africa|Swahili
Ethiopia|Addis Ababa|birr|Africa|Amharic
Nigeria|Abuja|naira|Africa|English
Ghana|Accra|cedi|Africa|English
Senegal|Dakar|West African CFA franc|Africa|French
Angola|Luanda|kwanza|Africa|Portuguese
Tunisia|Tunis|Tunisian dinar|Africa|Arabic
Mexico|Mexico City|Mexican peso|North America|Spanish
Canada|Ottawa|Canadian dollar|North America|English
Cuba|Havana|Cuban peso|North America|Spanish
Guatemala|Guatemala City|quetzal|North America|Spanish
Costa Rica|San José|colón|North America|Spanish
Brazil|Brasília|real|South America|Portuguese
Argentina|Buenos Aires|Argentine peso|South America|Spanish
Chile|Santiago|Chilean peso|South America|Spanish
Peru|Lima|sol|South America|Spanish
Colombia|Bogotá|Colombian peso|South America|Spanish
Uruguay|Montevideo|Uruguayan peso|South America|Spanish
Australia|Canberra|Australian dollar|Oceania|English
New Zealand|Wellington|New Zealand dollar|Oceania|English
Fiji|Suva|Fijian dollar|Oceania|English
""",
)
_ELEMENTS = (
    "name|symbol|number|state|use",
    """
hydrogen|H|1|gas|rocket fuel
helium|He|2|gas|balloons
lithium|Li|3|metal|batteries
carbon|C|6|solid|pencils and steel
nitrogen|N|7|gas|fertilizers
oxygen|O|8|gas|breathing and welding
fluorine|F|9|gas|toothpaste additives
neon|Ne|10|gas|bright signs
sodium|Na|11|metal|table salt
magnesium|Mg|12|metal|light alloys
aluminium|Al|13|metal|cans and aircraft
silicon|Si|14|solid|computer chips
phosphorus|P|15|solid|matches
sulfur|S|16|solid|sulfuric acid
chlorine|Cl|17|gas|cleaning water
argon|Ar|18|gas|welding
potassium|K|19|metal|fertilizers
calcium|Ca|20|metal|cement
titanium|Ti|22|metal|medical implants
chromium|Cr|24|metal|stainless steel
iron|Fe|26|metal|steel
cobalt|Co|27|metal|magnets and blue glass
nickel|Ni|28|metal|coins
copper|Cu|29|metal|electric wires
zinc|Zn|30|metal|coating steel
bromine|Br|35|liquid|flame retardants
krypton|Kr|36|gas|lamps
silver|Ag|47|metal|jewellery and mirrors
tin|Sn|50|metal|solder
iodine|I|53|solid|disinfectants
xenon|Xe|54|gas|bright headlights
tungsten|W|74|metal|lamp filaments
platinum|Pt|78|metal|catalytic converters
gold|Au|79|metal|jewellery
mercury|Hg|80|liquid|old thermometers
lead|Pb|82|metal|car batteries
uranium|U|92|metal|nuclear fuel
""",
)
_PLANETS = (
    "name|position|moons|feature",
    """
Mercury|first|no moons|is the smallest planet
Venus|second|no moons|is the hottest planet
Earth|third|one moon|is the only planet known to have life
Mars|fourth|two moons|looks red because of iron rust
Jupiter|fifth|dozens of moons|is the largest planet
Saturn|sixth|dozens of moons|has the brightest rings
Uranus|seventh|dozens of moons|spins on its side
Neptune|eighth|more than ten moons|has the fastest winds
""",
)
_ANIMALS = (
    "name|group|young|food|home",
    """
dog|mammal|puppy|meat|human homes
cat|mammal|kitten|meat|human homes
horse|mammal|foal|grass|open grassland
cow|mammal|calf|grass|farms
sheep|mammal|lamb|grass|meadows
goat|mammal|kid|leaves and grass|hills
lion|mammal|cub|meat|savannas
bear|mammal|cub|berries, fish and meat|forests
kangaroo|mammal|joey|grass|the Australian bush
deer|mammal|fawn|leaves and grass|woodland
elephant|mammal|calf|leaves and grass|savannas
whale|mammal|calf|krill or fish|oceans
seal|mammal|pup|fish|cold coasts
hare|mammal|leveret|grass and herbs|open fields
fox|mammal|kit|mice and berries|woods and fields
pig|mammal|piglet|roots and grain|farms
duck|bird|duckling|plants and insects|ponds
goose|bird|gosling|grass|lakes
swan|bird|cygnet|water plants|lakes
owl|bird|owlet|mice|woodland
eagle|bird|eaglet|fish and small animals|mountains and coasts
chicken|bird|chick|seeds and insects|farms
penguin|bird|chick|fish|southern coasts
frog|amphibian|tadpole|insects|ponds
toad|amphibian|tadpole|insects and slugs|damp gardens
salmon|fish|fry|small fish and insects|rivers and seas
eel|fish|elver|small water animals|rivers and seas
shark|fish|pup|fish|oceans
butterfly|insect|caterpillar|nectar|flowery meadows
bee|insect|larva|nectar and pollen|hives
spider|arachnid|spiderling|insects|webs
turtle|reptile|hatchling|plants and small animals|warm waters
crocodile|reptile|hatchling|fish and meat|warm rivers
""",
)
_WORKS = (
    "name|maker|verb|kind|country",
    """
Hamlet|William Shakespeare|wrote|play|England
Don Quixote|Miguel de Cervantes|wrote|novel|Spain
War and Peace|Leo Tolstoy|wrote|novel|Russia
Pride and Prejudice|Jane Austen|wrote|novel|England
Frankenstein|Mary Shelley|wrote|novel|England
Moby-Dick|Herman Melville|wrote|novel|the United States
Les Misérables|Victor Hugo|wrote|novel|France
The Divine Comedy|Dante Alighieri|wrote|poem|Italy
Faust|Johann Wolfgang von Goethe|wrote|play|Germany
Crime and Punishment|Fyodor Dostoevsky|wrote|novel|Russia
Great Expectations|Charles Dickens|wrote|novel|England
A Doll's House|Henrik Ibsen|wrote|play|Norway
The Metamorphosis|Franz Kafka|wrote|story|Bohemia
The Mona Lisa|Leonardo da Vinci|painted|painting|Italy
The Starry Night|Vincent van Gogh|painted|painting|the Netherlands
The Night Watch|Rembrandt|painted|painting|the Netherlands
Guernica|Pablo Picasso|painted|painting|Spain
The Scream|Edvard Munch|painted|painting|Norway
Las Meninas|Diego Velázquez|painted|painting|Spain
The Birth of Venus|Sandro Botticelli|painted|painting|Italy
The Magic Flute|Wolfgang Amadeus Mozart|composed|opera|Austria
Carmen|Georges Bizet|composed|opera|France
Aida|Giuseppe Verdi|composed|opera|Italy
Tosca|Giacomo Puccini|composed|opera|Italy
Swan Lake|Pyotr Tchaikovsky|composed|ballet|Russia
The Four Seasons|Antonio Vivaldi|composed|set of concertos|Italy
Finlandia|Jean Sibelius|composed|tone poem|Finland
Fidelio|Ludwig van Beethoven|composed|opera|Germany
Messiah|George Frideric Handel|composed|oratorio|Germany
""",
)
_MONTHS = (
    "name|position|days|after|before",
    """
January|first|31 days|February|December
February|second|28 days, or 29 in a leap year|March|January
March|third|31 days|April|February
April|fourth|30 days|May|March
May|fifth|31 days|June|April
June|sixth|30 days|July|May
July|seventh|31 days|August|June
August|eighth|31 days|September|July
September|ninth|30 days|October|August
October|tenth|31 days|November|September
November|eleventh|30 days|December|October
December|twelfth|31 days|January|November
""",
)


def _entities(table: tuple[str, str]) -> list[Entity]:
    header = table[0].split("|")
    return [dict(zip(header, row, strict=True)) for row in rows(table[1])]


@cache
def real_world() -> dict[str, list[Entity]]:
    """Every real entity by kind."""
    return {
        "country": _entities(_COUNTRIES),
        "element": _entities(_ELEMENTS),
        "planet": _entities(_PLANETS),
        "animal": _entities(_ANIMALS),
        "work": _entities(_WORKS),
        "month": _entities(_MONTHS),
    }
