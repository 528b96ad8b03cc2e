"""Events that short reports tell of, with the sentences that tell and sum them up.

Slots every event may use: town, day, who, other, n (20-890), m (2-19), k (3-40), month, year.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """A kind of event: the lead, the sentences that follow, summaries, what a second sentence of a
    summary may add, and the event's own lists of details."""

    name: str
    lead: str
    body: tuple[str, ...]
    summaries: tuple[str, ...]
    more: tuple[str, ...]
    lists: dict[str, tuple[str, ...]]


# Remarks that may stand anywhere in a report and never belong in its summary.
FILLERS = (
    "The local paper first reported the story.",
    "Many people talked about the news in the shops.",
    "Photographs can be seen at the town hall.",
    "Further details will be announced later.",
    "The day was cool and cloudy.",
    "A short film about it is planned.",
)

EVENTS = (
    Event(
        "match",
        "[{town} beat {rival} {m} to 1 on {day}|On {day}, {town} won {m} to 1 against {rival}] in {sport}.",
        (
            "{who} scored first after {k} minutes.",
            "About {n} [fans|people] watched the game[| in the rain| in the new stadium].",
            "Coach {other} [said the team had worked hard|praised the young players|was pleased with the victory].",
            "The team will play its next game in {month}.",
        ),
        (
            "{town} beat {rival} {m} to 1 in {sport} on {day}[.|, with the first score by {who}.]",
            "{town} won its {sport} game against {rival} {m} to 1[.| in front of {n} people.]",
            "[With|After] an early score by {who}, {town} beat {rival} {m} to 1 on {day}.",
        ),
        (
            "Coach {other} [was happy after|commented on] the victory.",
            "The next game [is planned for|will be in] {month}.",
        ),
        {
            "rival": ("Northgate", "Easton", "Redhill", "Lakeview", "Sandport", "Kingsway"),
            "sport": ("handball", "ice hockey", "hockey", "water polo"),
        },
    ),
    Event(
        "storm",
        "[A(n) {weather} hit {town} on {day}|On {day}, a(n) {weather} struck {town}].",
        (
            "It [damaged|destroyed parts of] {n} homes and closed {m} roads.",
            "[Fire chief|Rescue leader] {who} said that nobody was [badly hurt|killed].",
            "Schools will stay closed until {until}.",
            "Repairs may take {k} days, [experts say|according to the council|officials believe].",
        ),
        (
            "A(n) {weather} damaged {n} homes in {town} on {day}[.| and closed {m} roads.]",
            "{n} homes in {town} were damaged by a(n) {weather}[.|, but nobody was badly hurt.]",
            "After a(n) {weather} in {town}, {n} homes are damaged and schools stay closed until {until}.",
        ),
        (
            "Repairs [may take|are expected to take] {k} days.",
            "{who} [said that|reported that] nobody was seriously hurt.",
        ),
        {
            "weather": ("strong storm", "heavy flood", "hail storm", "snow storm", "whirlwind"),
            "until": ("Wednesday", "Thursday", "next week", "the end of the month"),
        },
    ),
    Event(
        "council",
        "[The town council of {town} voted on {day} to {plan}|On {day}, the council of {town} decided to {plan}].",
        (
            "The plan will cost {n} thousand [euros|crowns].",
            "Mayor {who} [said it would help families|called it a good day for the town|had asked for it for years].",
            "{other} of the opposition said [it was too expensive|the money was needed elsewhere].",
            "Work will start in {month} and last {k} weeks.",
            "The vote was {m} to 1.",
        ),
        (
            "The council of {town} voted to {plan}[.| at a cost of {n} thousand.| from {month}.]",
            "{town} will {plan}[.|, and work will start in {month}.]",
            "Despite criticism from {other}, {town} decided to {plan}[.| in {month}.]",
        ),
        (
            "Mayor {who} [supports|is in favour of] the plan, [but|while] {other} is against it.",
            "The work [will last|is to take] {k} weeks.",
        ),
        {
            "plan": (
                "build a new swimming pool",
                "repair the old bridge",
                "open a second library",
                "plant trees along the main street",
                "close the centre to cars",
                "build a bicycle path",
                "buy electric buses",
                "restore the market hall",
            )
        },
    ),
    Event(
        "study",
        "[Researchers from {town} have found that {finding}|A study from {town} shows that {finding}].",
        (
            "The team led by {who} [observed|tested|followed] {n} {subjects} over {k} months.",
            "The results were [published|presented] on {day}.",
            "{other}, who was not part of the study, [called the work careful|asked for more data|said the result "
            "was surprising].",
            "A larger study will begin in {month}.",
        ),
        (
            "A study of {n} {subjects} led by {who} shows that {finding}.",
            "Researchers from {town} found that {finding}[.| after {k} months of work.]",
            "{finding}, according to [a study from {town}|{who} and a team from {town}].",
        ),
        (
            "A larger study [is planned for|will begin in] {month}.",
            "{other}, an outside expert, [commented on|gave an opinion on] the results.",
        ),
        {
            "finding": (
                "short walks improve memory",
                "quiet music helps people sleep",
                "green roofs cool houses",
                "bees prefer blue flowers",
                "cold water saves energy in washing",
                "reading aloud helps children learn",
                "old trees store more carbon",
            ),
            "subjects": ("cases", "samples"),
        },
    ),
    Event(
        "business",
        "[The company {firm} will {move} in {town}|{firm} said on {day} that it will {move} in {town}].",
        (
            "The step [creates|brings] {n} jobs over {m} years.",
            "Director {who} [said demand was growing|called the town a good place for business|announced the plan "
            "to the staff].",
            "The company was founded in {year}.",
            "{other} of the workers' union [welcomed the news|asked for higher wages].",
            "The plan was announced on {day}.",
        ),
        (
            "{firm} will {move} in {town}[.| and create {n} jobs.]",
            "The company {firm} plans to {move} in {town}, [which creates|bringing] {n} jobs.",
            "{n} jobs will be created as {firm} plans to {move} in {town}.",
        ),
        (
            "Director {who} [announced|presented] the plan on {day}.",
            "The company [has existed since|was founded in] {year}.",
        ),
        {
            "firm": (
                "Alpen Tools",
                "Delta Foods",
                "Granite Glass",
                "Lumen Optics",
                "Orbit Motors",
                "Tidal Energy",
                "Willow Paper",
                "Kestrel Shipping",
            ),
            "move": (
                "build a factory",
                "open a research centre",
                "enlarge its plant",
                "open a warehouse",
                "start a training school",
            ),
        },
    ),
    Event(
        "exhibition",
        "[The museum in {town} opened a show of {art} on {day}|On {day}, a show of {art} opened at the museum in "
        "{town}].",
        (
            "It shows {n} works, [many for the first time|some of them very rare].",
            "The oldest piece was made in {year}.",
            "Director {who} [worked on it for {m} years|spent {m} years on the plan].",
            "The artist {other} gave a speech[| at the opening| to the guests].",
            "Visitors can see the show until {month}.",
        ),
        (
            "A show of {n} works of {art} opened at the museum in {town}[.| on {day}.]",
            "The museum in {town} shows {art} until {month}[.|, with {n} works.]",
            "{n} works of {art} can be seen in {town} until {month}[.|, thanks to {who}.]",
        ),
        (
            "Director {who} [planned it for|worked on it for] {m} years.",
            "The oldest piece [dates from|was made in] {year}.",
        ),
        {
            "art": (
                "map making",
                "modern sculpture",
                "folk dress",
                "silver work",
                "sea painting",
                "early photography",
                "glass art",
                "children's drawing",
            )
        },
    ),
    Event(
        "accident",
        "[A(n) {vehicle} hit {thing} in {town} on {day}|On {day}, a(n) {vehicle} crashed into {thing} in {town}].",
        (
            "The driver, {who}, was [slightly hurt|taken to hospital|not hurt].",
            "{m} other [cars|drivers] had to wait for {k} minutes.",
            "Police officer {other} said that {cause} was the cause.",
            "The damage is about {n} thousand [euros|crowns].",
        ),
        (
            "A(n) {vehicle} hit {thing} in {town} on {day}[.| because of {cause}.]",
            "{cause} caused a(n) {vehicle} to hit {thing} in {town}[.| on {day}.]",
            "In {town}, a(n) {vehicle} driven by {who} crashed into {thing}; the damage is about {n} thousand.",
        ),
        ("The driver was {who}[.|, and {m} others had to wait.]", "Traffic [stood still|was stopped] for {k} minutes."),
        {
            "vehicle": ("bus", "lorry", "tram", "delivery van", "tractor"),
            "thing": ("a shop window", "a bridge", "a parked car", "a garden wall", "a lamp post"),
            "cause": ("ice on the road", "thick fog", "a broken brake", "a sudden illness"),
        },
    ),
    Event(
        "rescue",
        "[{who} saved {victim} from {danger} in {town} on {day}|In {town}, {who} rescued {victim} from {danger} on "
        "{day}].",
        (
            "The [rescue|work] took {k} minutes and needed {m} helpers.",
            "{other}, who saw it all, [called the police|brought blankets|praised the quick action].",
            "The town will give the rescuer {n} crowns and a medal.",
            "A party is planned for {month}.",
        ),
        (
            "{who} saved {victim} from {danger} in {town}[.| on {day}.]",
            "{victim} was saved from {danger} by {who}[.| in {town}.]",
            "After saving {victim} from {danger}, {who} will receive a medal[.| from {town}.]",
        ),
        (
            "It took {k} minutes and [the help of {m} people|{m} helpers].",
            "[The town thanks the rescuer with|The reward is] {n} crowns and a medal.",
        ),
        {
            "victim": ("a child", "an old man", "a dog", "a horse", "a young woman", "a cyclist"),
            "danger": ("a frozen lake", "a burning house", "a deep well", "a flooded cellar", "the river"),
        },
    ),
    Event(
        "record",
        "[{who} from {town} set a record on {day} by {feat}|On {day}, {who} set a record in {town} by {feat}].",
        (
            "It took {k} hours and {m} minutes.",
            "About {n} people [cheered|watched] along the way.",
            "The old record, set by {other}, had stood since {year}.",
            "The next attempt is planned for {month}.",
        ),
        (
            "{who} set a record by {feat}[.| in {k} hours and {m} minutes.]",
            "By {feat}, {who} broke the record of {other}[.| from {year}.]",
            "A record from {year} was broken [on {day}|in {town}] by {who}, who did it by {feat}.",
        ),
        ("About {n} people [watched|saw it happen].", "[Another try|The next attempt] is planned for {month}."),
        {
            "feat": (
                "swimming across the bay",
                "running up the tower",
                "cycling around the lake",
                "baking the longest loaf of bread",
                "rowing down the river",
                "playing the piano without a break",
            )
        },
    ),
    Event(
        "festival",
        "[The {kind} festival in {town} drew {n} guests on {day}|On {day}, {n} guests came to the {kind} festival "
        "in {town}].",
        (
            "{m} groups [took part|performed] this year.",
            "{who} won the first prize[| after a close vote| for the second time].",
            "The event has been held since {year}.",
            "Organizer {other} [was happy with the day and thanked the helpers|was happy with the day|was happy "
            "with the day and hopes for more guests].",
            "The winner spent {k} days on the work.",
        ),
        (
            "{n} guests came to the {kind} festival in {town}, where {who} won the first prize.",
            "{who} won the first prize at the {kind} festival in {town}[.| on {day}.]",
            "The {kind} festival in {town} drew {n} guests and {m} groups[.|; {who} won.]",
        ),
        (
            "The event [has existed|has been held] since {year}.",
            "Organizer {other} [commented on|was happy with] the day.",
        ),
        {"kind": ("lantern", "kite", "bread", "puppet", "flower", "sand castle", "boat")},
    ),
    Event(
        "theft",
        "[Thieves stole {loot} from {place} in {town} on {day}|On {day}, {loot} was stolen from {place} in {town}].",
        (
            "The loss is about {n} thousand [euros|crowns].",
            "{who}, the owner, [noticed it in the morning and called the police|called the police at once].",
            "Police officer {other} said {m} [people had been questioned|traces had been found].",
            "A similar theft took place in {month}, {k} kilometres away.",
        ),
        (
            "{loot} worth {n} thousand was stolen from {place} in {town}[.| on {day}.]",
            "Thieves stole {loot} from {place} in {town}[.|, and the police are searching.]",
            "Police in {town} are looking for thieves who stole {loot} from {place}[.| on {day}.]",
        ),
        ("The owner, {who}, [called|informed] the police.", "A similar [crime|theft] happened nearby in {month}."),
        {
            "loot": (
                "gold jewellery",
                "old silver",
                "camera equipment",
                "a valuable painting",
                "a rare violin",
                "wine",
            ),
            "place": ("a shop", "a museum", "a private house", "a hotel", "a warehouse"),
        },
    ),
    Event(
        "animal",
        "[A(n) {animal} escaped from {home} in {town} on {day}|On {day}, a(n) {animal} ran away from {home} in "
        "{town}].",
        (
            "It was free for {k} hours and was seen by {n} people.",
            "{who} found it {where}.",
            "Its keeper, {other}, [was very glad|was glad to have it back|promised a better fence].",
            "It is {m} years old and very [tame|shy|curious].",
        ),
        (
            "A(n) {animal} that escaped from {home} in {town} was found {where} by {who}.",
            "{who} found the {animal} that had run away from {home} in {town}[.| after {k} hours.]",
            "After {k} hours, a runaway {animal} was found {where} in {town}[.| by {who}.]",
        ),
        (
            "Its keeper, {other}, [was glad|was pleased] to have it back.",
            "The animal is {m} years old[.| and was seen by {n} people.]",
        ),
        {
            "animal": ("monkey", "goat", "donkey", "penguin", "llama", "parrot", "ostrich"),
            "home": ("the zoo", "a farm", "a circus", "a school garden"),
            "where": (
                "behind the station",
                "in a church",
                "on a football field",
                "in a supermarket",
                "next to the river",
            ),
        },
    ),
)
