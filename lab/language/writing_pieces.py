"""The kinds of short pieces `writing` asks for, with their wordings and follow-ups.

All prompts of a piece give the same details. Slots: to, me, town, day, time, n and those of DETAILS.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.language.words import Turn


@dataclass(frozen=True, slots=True)
class Piece:
    """A kind of piece: how it is asked for and written, and what may be asked next."""

    name: str
    first: Turn
    follow_ups: tuple[Turn, ...]


DETAILS = {
    "reason": ("a late train", "a bad cold", "a broken car", "a visit to the dentist", "a family party", "heavy snow"),
    "event": ("meeting", "dinner", "concert", "workshop", "interview", "chess evening", "book club"),
    "party": ("dinner", "concert", "chess evening", "book club", "garden party", "picnic", "film night", "barbecue"),
    "item": (
        "bread knife",
        "reading lamp",
        "rain jacket",
        "backpack",
        "teapot",
        "garden chair",
        "wool blanket",
        "bicycle bell",
        "desk clock",
        "water bottle",
    ),
    "colour": ("red", "blue", "green", "black", "white", "yellow", "grey", "brown"),
    "stuff": ("light and strong", "small and handy", "warm and soft", "simple and cheap", "solid and safe"),
    "thing": (
        "old key",
        "silver coin",
        "torn map",
        "wet letter",
        "tiny bell",
        "locked box",
        "blue feather",
        "broken watch",
    ),
    "place": (
        "a quiet library",
        "an empty station",
        "a dark cellar",
        "a windy bridge",
        "a small bakery",
        "an old lighthouse",
        "a snowy forest",
    ),
    "job": ("gardener", "teacher", "sailor", "clockmaker", "nurse", "postman", "musician", "detective"),
    "sight": (
        "the old harbour",
        "the market square",
        "the glass tower",
        "the castle hill",
        "the river path",
        "the puppet theatre",
    ),
    "dish": ("fish soup", "plum cake", "mushroom pie", "goat cheese", "apple bread", "lentil stew"),
    "gift": ("a cake", "some music", "a game", "a warm coat", "a poem", "a photo"),
    "fault": (
        "the room was small",
        "the music was loud",
        "the wait was long",
        "the price was high",
        "the chairs were hard",
    ),
    "praise": (
        "the staff was kind",
        "the food was fresh",
        "the view was lovely",
        "the rooms were clean",
        "the light was warm",
    ),
    "house": ("hotel", "restaurant", "café", "guest house", "tea room"),
}

EMAIL = Piece(
    "email",
    Turn(
        (
            "Write a short email to {to} from {me}: {me} will miss the {event} on {day} because of {reason}.",
            "Help {me} write to {to} to cancel the {event} on {day}. The reason is {reason}.",
            "{me} cannot come to the {event} on {day} because of {reason}. Write a brief email to {to}.",
        ),
        (
            "Dear {to}, [I am sorry, but I cannot come|unfortunately I will not be able to come|I am afraid I have "
            "to miss our plan and cannot come] to the {event} on {day} because of {reason}. [Could we find another "
            "day?|I hope we can meet soon.|Please tell me what I missed.] [Best wishes|Kind regards|Yours], {me}",
        ),
    ),
    (
        Turn(
            ("Make it more formal.", "Please rewrite it in a formal tone."),
            (
                "Dear {to}, [I regret to inform you|I am writing to let you know] that I am unable to attend the "
                "{event} on {day} [owing to|due to] {reason}. [Please accept my apologies.|I apologize for any "
                "trouble this may cause.] [Yours sincerely|Respectfully], {me}",
            ),
        ),
        Turn(
            ("Make it shorter.", "Now write it as a text message."),
            (
                "Hi {to}, [sorry, I can't make|I have to miss] the {event} on {day} because of {reason}. [Talk "
                "soon|See you soon|Sorry again], {me}",
            ),
        ),
        Turn(
            ("Add an offer to meet at {time} on another day.", "Also suggest a call at {time}."),
            (
                "Dear {to}, I [am sorry, but I cannot|will not be able to] come to the {event} on {day} because of "
                "{reason}. [Would a time like {time} on another day suit you?|Perhaps we can talk at {time} on "
                "another day.] [Best wishes|Kind regards], {me}",
            ),
        ),
    ),
)

STORY = Piece(
    "story",
    Turn(
        (
            "Write the opening of a story about {me}, a(n) {job}, who finds a(n) {thing} in {place}.",
            "Begin a short story: {me} is a(n) {job} and finds a(n) {thing} in {place}.",
            "I need the first lines of a story. {me}, a(n) {job}, discovers a(n) {thing} in {place}.",
        ),
        (
            "[It was almost dark when|The clock had just struck nine when|Nobody else was there when] {me}, [a "
            "tired|a curious|a quiet] {job}, [stepped into|walked into|entered] {place}. [On the floor|In a "
            "corner|Under some dust] lay a(n) {thing}. [Who had left it there?|It felt strangely warm.|{me} knew at "
            "once that it was no ordinary find.]",
        ),
    ),
    (
        Turn(
            ("Give the story a title.", "What would be a good title?"),
            (
                '[A good title would be|I would call it|The story could be called] "The {job} and the {thing}"[, '
                "because it names both the hero and the mystery.|"
                " since everything starts with the {thing} that {me} finds.|, as {me} and the "
                "{thing} are at its heart.]",
            ),
        ),
        Turn(
            ("Continue with two more sentences.", "What happens next?"),
            (
                '{me} picked up the {thing} and [heard a soft voice|saw a light go on|felt a cold wind]. ["At '
                'last," someone whispered, "the {job} has come."|Then the door closed, and the {job} was no '
                "longer alone.|"
                "From that night on, the {job} could not think of anything else.]",
            ),
        ),
        Turn(
            ("Rewrite it in the first person.", "Tell it from the view of {me}."),
            (
                "[It was almost dark when|The clock had just struck nine when] I, a(n) {job} named {me}, [stepped "
                "into|entered] {place}. [On the floor|In a corner] lay a(n) {thing}, and [I knew my life would "
                "change|I wondered who had left it there].",
            ),
        ),
    ),
)

PRODUCT = Piece(
    "product",
    Turn(
        (
            "Write a product description for a {colour} {item}. It is {stuff} and costs {n} euros.",
            "Describe this product for our web shop: {item}, {colour}, {stuff}, {n} euros.",
            "We sell a {colour} {item} that is {stuff}. Write a text for it and name the price of {n} euros.",
        ),
        (
            "[Meet|Discover|Here is] our {colour} {item}: {stuff}, [just as you need it|made for daily use|and a "
            "joy to use]. [It looks good in every home.|It makes a fine present.|It will last for years.] [Get "
            "yours for only|Order it today for|It is yours for] {n} euros.",
        ),
    ),
    (
        Turn(
            ("Make it shorter.", "Cut it down to one sentence."),
            ("[Our|The] {colour} {item}: {stuff}, [now for {n} euros.|for only {n} euros.|and yours for {n} euros.]",),
        ),
        Turn(
            ("Write a slogan for it.", "Give it a catchy title."),
            (
                '[Your slogan could be:|How about this:|I suggest:] "[The {item} that is {stuff}|{stuff}: the '
                '{item} for you|Life is better with a {colour} {item}]."',
            ),
        ),
        Turn(
            ("Add who it is good for: a(n) {job}.", "Address it to a(n) {job}."),
            (
                "[Are you a(n) {job}?|For every {job}:|Dear {job},] [our {colour} {item} is {stuff}|this {colour} "
                "{item} is {stuff}] and [helps you at work|makes your day easier|goes with you everywhere]. [Get it "
                "for|Order it for] {n} euros.",
            ),
        ),
    ),
)

TRAVEL = Piece(
    "travel",
    Turn(
        (
            "Write a short travel note about {town}. Mention {sight} and the {dish}.",
            "I was in {town}, saw {sight} and ate {dish}. Turn this into a travel note.",
            "Write a few lines for my travel blog about {town}, {sight} and the local {dish}.",
        ),
        (
            "[{town} is well worth a trip.|{town} surprised me.|If you have a free day, go to {town}.] [I began "
            "at|The best walk leads to|Start your day at] {sight}, [where the view is wonderful|which is lovely in "
            "the morning|where time seems to stand still]. [Afterwards, try the|At noon I had the|Do not leave "
            "without tasting the] {dish}, [which is the pride of the town|the best I have ever had|served warm in "
            "every inn].",
        ),
    ),
    (
        Turn(
            ("Add a tip for rainy days.", "What can I do there when it rains?"),
            (
                "[When it rains|On a rainy day|In bad weather], [stay inside and enjoy|find a cosy inn and order] "
                "the {dish}, [then|and later] visit {sight} [with an umbrella|when the sky clears]. {town} is "
                "[charming|pretty|worth seeing] in any weather.",
            ),
        ),
        Turn(
            ("Give the note a title.", "Suggest a headline."),
            (
                '[A fitting title is|I would choose the headline|You could call it] "[A Day in {town}|{town} and '
                'its {dish}|From {sight} to the {dish}]".',
            ),
        ),
        Turn(
            ("Make it shorter.", "Write it as a postcard to {to}."),
            (
                "[Greetings from {town}!|Dear friends, {town} is great!] [I saw|Today I visited] {sight} and "
                "[ate|tried] the {dish}. [Wish you were here.|It was wonderful.|You would love it.]",
            ),
        ),
    ),
)

INVITATION = Piece(
    "invitation",
    Turn(
        (
            "Write an invitation from {me} to {to} for a(n) {party} in {town} on {day} at {time}.",
            "{me} wants to invite {to} to a(n) {party} on {day} at {time} in {town}. Write the invitation.",
            "Please write a friendly invitation: {party}, {day}, {time}, {town}; from {me} to {to}.",
        ),
        (
            "Dear {to}, [you are warmly invited|I would love to invite you|please come] to a(n) {party} in {town} "
            "on {day} at {time}. [There will be snacks and good company.|Some old friends will be there too.|It "
            "will be a pleasant time.] [Please let me know if you can come.|I hope you can make it.] [Yours|Warm "
            "wishes|Best], {me}",
        ),
    ),
    (
        Turn(
            ("Ask {to} to bring {gift}.", "Add a request to bring {gift}."),
            (
                "Dear {to}, [you are warmly invited|please come] to a(n) {party} in {town} on {day} at {time}. "
                "[Could you bring|Would you please bring|May I ask you to bring] {gift}? [I look forward to it.|See "
                "you there!] [Yours|Best], {me}",
            ),
        ),
        Turn(
            ("Make it more formal.", "Rewrite it formally."),
            (
                "Dear {to}, [it is my pleasure to invite you|I have the honour of inviting you] to a(n) {party}, "
                "which will take place in {town} on {day} at {time}. [I would be grateful for a reply.|Kindly "
                "confirm your attendance.] [Yours sincerely|Respectfully], {me}",
            ),
        ),
        Turn(
            ("Write the answer of {to}, who can come.", "Now write a reply in which {to} accepts."),
            (
                "Dear {me}, [thank you for the invitation|thank you so much for asking me|how kind of you]. I [will "
                "gladly come|am happy to come|would love to come] to the {party} in {town} on {day} at {time}. [See "
                "you then|Best wishes|Yours], {to}",
            ),
        ),
    ),
)

REVIEW = Piece(
    "review",
    Turn(
        (
            "Write a review of a {house} in {town}: {praise}, but {fault}.",
            "I stayed at a {house} in {town}. I liked that {praise}, but {fault}. Write a review.",
            "Review this {house} in {town} for me. Good: {praise}. Bad: {fault}.",
        ),
        (
            "[We visited|I went to|Last week I tried] this {house} in {town}. [I was pleased that|It was nice "
            "that|The best thing was that] {praise}. [However|On the other hand|Sadly], {fault}. [All in all, I "
            "would go again.|Overall it was a fair visit.|I give it three stars.]",
        ),
    ),
    (
        Turn(
            ("Make it one sentence.", "Shorten it."),
            (
                "[At this {house} in {town}|In the {house} in {town}], {praise}, but {fault}[.|, so I give it three "
                "stars.]",
            ),
        ),
        Turn(
            ("Write a polite answer from the owner, {to}.", "How could the owner, {to}, reply?"),
            (
                "Dear guest, thank you for [visiting our {house} in {town}|your review of our {house}]. We are "
                "[glad|happy] that {praise}, and [we are sorry|we regret] that {fault}. [We will do better next "
                "time.|We hope to see you again.] {to}",
            ),
        ),
        Turn(
            ("Add that the visit was on {day}.", "Mention {day} as the day of the visit."),
            (
                "[On {day} we visited|Last {day} I tried] this {house} in {town}. [I was pleased that|The best "
                "thing was that] {praise}. [However|Sadly], {fault}. [All in all, I would go again.|Overall it was "
                "a fair visit.]",
            ),
        ),
    ),
)

PIECES = (EMAIL, STORY, PRODUCT, TRAVEL, INVITATION, REVIEW)
