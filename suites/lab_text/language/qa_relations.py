"""How to ask for each attribute of each kind of entity, and how to answer.

Questions are plain sentences without choices: a fact and the number of its wording fix the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbench_ss.suites.lab_text.language.words import rows


@dataclass(frozen=True, slots=True)
class Relation:
    """An attribute of a kind of entity: six or more questions, and answers that add a related fact."""

    kind: str
    attribute: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


# Wordings that fit any attribute told as a noun phrase ("the capital of {name}").
_PHRASE_QUESTIONS = (
    "What is {phrase}?", "Tell me {phrase}.", "Can you name {phrase}?", "I need to know {phrase}.",
    "Do you know {phrase}?", "Please tell me {phrase}.", "I forgot {phrase}. What is it?", "Question: what is {phrase}?",
)
# Wordings that fit any attribute told as a clause ("which river {name} lies on").
_CLAUSE_QUESTIONS = (
    "Tell me {clause}.", "Do you know {clause}?", "Can you say {clause}?", "I would like to know {clause}.",
    "Please tell me {clause}.", "Could you explain {clause}?", "I wonder {clause}.",
)

# kind | attribute | noun phrase | the fact as a sentence | related facts in turn. `/` parts alternatives.
_BY_PHRASE = """
country|capital|the capital of {name}|The capital of {name} is {capital}. / {capital} is the capital of {name}.|It is a country in {continent}. / The country's currency is the {currency}. / An official language of the country is {language}.
country|currency|the currency of {name}|The currency of {name} is the {currency}. / People in {name} pay with the {currency}.|Its capital is {capital}. / The country lies in {continent}.
country|continent|the continent where {name} lies|{name} lies in {continent}. / {name} is a country in {continent}.|Its capital is {capital}. / Its currency is the {currency}.
country|language|an official language of {name}|An official language of {name} is {language}. / {language} is an official language of {name}.|The capital is {capital}. / The country lies in {continent}.
element|symbol|the chemical symbol of {name}|The chemical symbol of {name} is {symbol}. / {name} has the symbol {symbol}.|Its atomic number is {number}. / The element is used for {use}.
element|number|the atomic number of {name}|The atomic number of {name} is {number}. / {name} has the atomic number {number}.|Its symbol is {symbol}. / It is used for {use}.
element|use|a common use of the element {name}|{name} is used for {use}. / A common use of {name} is {use}.|Its chemical symbol is {symbol}. / Its atomic number is {number}.
planet|position|the position of the planet {name} from the Sun|{name} is the {position} planet from the Sun. / Counting from the Sun, {name} is the {position} planet.|It has {moons}. / The planet {feature}.
planet|moons|the number of moons of the planet {name}|The planet {name} has {moons}. / {name} is a planet with {moons}.|It is the {position} planet from the Sun. / It {feature}.
planet|feature|a special feature of the planet {name}|The planet {name} {feature}. / Among the planets, {name} {feature}.|It is the {position} planet from the Sun. / It has {moons}.
animal|young|the usual name for a young {name}|A young {name} is called a(n) {young}. / The young of a(n) {name} is called a(n) {young}.|The {name} is a(n) {group}. / It can be found in or near {home}.
animal|group|the group of animals that the {name} belongs to|The {name} is a(n) {group}. / The {name} belongs to the group of the {group}s.|Its young is called a(n) {young}. / It feeds on {food}.
animal|food|the usual food of the {name}|The {name} feeds on {food}. / The usual food of the {name} is {food}.|It is a(n) {group}. / It can be found in or near {home}.
work|maker|the name of the person who {verb} "{name}"|"{name}" was the work of {maker}. / {maker} {verb} "{name}".|It is a famous {kind}. / The artist came from {country}.
work|kind|the kind of work that "{name}" is|"{name}" is a(n) {kind}. / The work "{name}" is a(n) {kind}.|{maker} {verb} it. / It was made by {maker}, who came from {country}.
month|days|the number of days in {name}|{name} has {days}. / The month of {name} has {days}.|It is the {position} month of the year. / The month after it is {after}.
month|after|the month that follows {name}|{after} follows {name}. / The month after {name} is {after}.|{name} has {days}. / {name} is the {position} month of the year.
month|before|the month that comes before {name}|{before} comes before {name}. / The month before {name} is {before}.|{name} has {days}. / {name} is the {position} month of the year.
town|founded|the year when the town of {name} was founded|The town of {name} was founded in {founded}. / {name} was founded in the year {founded}.|It lies on the river {river}. / It is a town in {region}.
town|product|the best-known product of the town of {name}|The town of {name} is known for its {product}. / The best-known product of {name} is its {product}.|Its {festival} festival takes place in {month}. / The town was founded in {founded}.
town|mayor|the name of the mayor of {name}|The mayor of {name} is {mayor}. / {mayor} is the mayor of {name}.|The town lies on the river {river}. / The town is in {region}.
town|festival|the name of the yearly festival in {name}|The town of {name} holds a(n) {festival} festival every {month}. / The yearly festival in {name} is the {festival} festival in {month}.|The town is known for its {product}. / The town lies in {region}.
firm|founder|the name of the founder of the company {name}|The company {name} was founded by {founder}. / {founder} founded {name}.|It was founded in {founded}. / It makes {goods}.
firm|founded|the founding year of the company {name}|The company {name} was founded in {founded}. / {name} has existed since {founded}.|Its founder was {founder}. / It is based in {town}.
firm|staff|the number of people who work at {name}|About {staff} people work at {name}. / {name} has about {staff} workers.|The company makes {goods}. / The company is based in {town}.
artist|born|the year when {name} was born|The {job} {name} was born in {born}. / {name} was born in the year {born}.|The {job} made the {work} "{title}" in {year}. / The {job} came from {town}.
artist|job|the profession of {name}|{name} was a(n) {job}. / By profession, {name} was a(n) {job}.|The {work} "{title}" is from {year}. / The {job} was born in {born}.
artist|title|the best-known work of {name}|The best-known work of {name} is the {work} "{title}". / {name} is best known for the {work} "{title}".|It is from {year}. / The {job} came from {town}.
river|length|the length of the river {name}|The river {name} is {length} kilometres long. / The {name} has a length of {length} kilometres.|It rises in {source}. / It flows into {end}.
river|end|the place where the river {name} ends|The river {name} flows into {end}. / The {name} ends in {end}.|It is {length} kilometres long. / It is known for its {fish}.
river|source|the region where the river {name} rises|The river {name} rises in {source}. / The source of the {name} is in {source}.|It flows into {end}. / The river is {length} kilometres long.
"""
_BY_CLAUSE = """
country|inverse|which country has {capital} as its capital|{capital} is the capital of {name}. / The country whose capital is {capital} is {name}.|The country lies in {continent}. / Its currency is the {currency}.
element|inverse|which element has the symbol {symbol}|{symbol} is the symbol of {name}. / The element with the symbol {symbol} is {name}.|Its atomic number is {number}. / It is used for {use}.
element|state|whether {name} is a solid, a liquid, a gas or a metal|At room temperature, {name} is a {state}. / {name} is a {state} at room temperature.|Its chemical symbol is {symbol}. / Its atomic number is {number}.
planet|inverse|which planet is the {position} from the Sun|The {position} planet from the Sun is {name}. / {name} is the {position} planet from the Sun.|It has {moons}. / It {feature}.
animal|home|where the {name} can be found|The {name} can be found in or near {home}. / People find the {name} in or near {home}.|It feeds on {food}. / It is a(n) {group}.
work|country|which country the maker of "{name}" came from|"{name}" was made by {maker}, who came from {country}. / {maker}, who {verb} "{name}", came from {country}.|The work is a(n) {kind}. / It is a famous {kind}.
month|inverse|which month is the {position} of the year|The {position} month of the year is {name}. / {name} is the {position} month of the year.|It has {days}. / The month after it is {after}.
town|river|which river {name} lies on|{name} lies on the river {river}. / The town of {name} lies on the {river}.|It was founded in {founded}. / It is known for its {product}.
town|region|which region {name} belongs to|{name} belongs to {region}. / The town of {name} is in {region}.|It lies on the river {river}. / Its mayor is {mayor}.
firm|town|where the company {name} is based|The company {name} is based in {town}. / {name} has its head office in {town}.|It was founded in {founded}. / About {staff} people work there.
firm|goods|what the company {name} makes|The company {name} makes {goods}. / {name} is a maker of {goods}.|It is based in {town}. / It was founded by {founder}.
artist|town|which town {name} came from|The {job} {name} came from {town}. / {name} came from the town of {town}.|The {job} was born in {born}. / The {work} "{title}" is the best-known work.
artist|inverse|who made the {work} "{title}"|The {work} "{title}" was made by {name}. / {name} made the {work} "{title}".|The {job} came from {town}. / It is from {year}.
river|fish|which fish the river {name} is known for|The river {name} is known for its {fish}. / The {name} is famous for {fish}.|It flows into {end}. / It rises in {source}.
"""


def _answers(fact: str, more: str) -> tuple[str, ...]:
    """Every way to state the fact with every related fact."""
    return tuple(f"{first.strip()} {second.strip()}" for first in fact.split(" / ") for second in more.split(" / "))


def _relations(table: str, wordings: tuple[str, ...], slot: str) -> list[Relation]:
    return [
        Relation(kind, attribute, tuple(wording.replace(f"{{{slot}}}", asked) for wording in wordings),
                 _answers(fact, more))
        for kind, attribute, asked, fact, more in rows(table)
    ]


RELATIONS = (*_relations(_BY_PHRASE, _PHRASE_QUESTIONS, "phrase"),
             *_relations(_BY_CLAUSE, _CLAUSE_QUESTIONS, "clause"))
