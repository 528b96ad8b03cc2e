# ruff: noqa: E501 - a template or a word list is one line
"""Dialogues of customers, patients and travellers with those who serve them.

A scene starts with `# name | slots`; `A:` and `B:` are lines, `?` marks a line that may be left out, and
each `=` is one way to sum the scene up. {hisA}, {himA} are pronouns that fit without verb agreement.
"""

SERVICE = """
# table | n=2-9 day=weekday time=evening food=food
A: [Hello|Good morning|Good afternoon], [I would like|I want|I am calling] to book a table for {n} people.
B: [Of course|Certainly|With pleasure]. [For which day|When would you like to come|What day suits you]?
A: [On {day} at {time}, please|{day} at {time} would be best].
?B: [Would you like to sit outside|Is a table by the window all right]?
?A: [Yes, that would be lovely|That sounds good].
B: [Good|Fine], your table is reserved. [Our special that day is|We will serve] {food}[| that day].
= {A} [books|reserves] a table for {n} people on {day} at {time}. {B} [says|mentions|tells {himA}] that {food} will be served that day.
= {A} [calls to book|wants to book] a table for {n} on {day} at {time}, and {B} [says|adds] that {food} will be served.
# faulty | item=device days=2-20 price=20-300
A: [Excuse me|Hello], [I bought this|I got this] {item} here {days} days ago and it [does not work|has stopped working].
B: I am [sorry|very sorry] to hear that. [What exactly happens|What is the problem]?
A: It [does not turn on|makes a strange noise and then stops|switches itself off].
?B: [Do you have the receipt|May I see the receipt]?
?A: [Yes, here it is|Of course, here you are].
B: [We can repair it or give you back|You can have a repair or get back] the {price} dollars[| you paid].
A: I would [prefer|rather have] the money[|, please].
= {A} [complains|reports] that a(n) {item} bought {days} days ago does not work. {B} offers a repair or a refund, and {A} [takes|chooses] the refund of {price} dollars.
= {A}'s {item} [stopped working|does not work] {days} days after it was bought. {A} prefers {B}'s offer of a refund of {price} dollars to a repair.
# doctor | body=body days=2-14 drug=drug times=2-4
B: [Good morning|Hello], what [brings you here|seems to be the problem|can I do for you] today?
A: [I have had|I have been having] [pain|a bad pain] in my {body} for {days} days.
B: [Does it hurt at night|Did you fall|Have you taken anything for it]?
A: [No, nothing like that|No, I have not].
B: [I will give you|Please take this|I am giving you] {drug}. Take it {times} times a day.
?A: [And when should I come back|Do I need to come back]?
?B: [Come back if it does not get better|Only if the pain stays].
= {A} has had pain in {hisA} {body} for {days} days. {B} [gives {himA}|prescribes] {drug} to be taken {times} times a day.
= {A} [sees|visits] {B} because of pain in {hisA} {body} that has lasted {days} days, and {B} [prescribes|gives {himA}] {drug} to be taken {times} times a day.
# appointment | day=weekday time=clock day2=weekday time2=clock reason=excuse
A: [Hello|Hi], I have an appointment [on {day} at {time}|at {time} on {day}], but [I have to change it|I cannot come].
B: [I see|That is a pity]. [May I ask why|What is the reason]?
A: I [have to|must] {reason}[| that day].
B: [Could you come on|How about|We have a free slot on] {day2} at {time2}[| instead]?
A: [Yes, that works|That is fine|Perfect], thank you.
= {A} [cannot keep|has to change] the appointment on {day} at {time} because {A} has to {reason}. {B} moves it to {day2} at {time2}.
= {B} [moves|changes] {A}'s appointment from {day} at {time} to {day2} at {time2} because {A} has to {reason}.
# train | from=city to=city time=clock price=15-120 plat=1-14
A: [When does the next train to {to} leave?|I need the next train to {to}, please.]
B: It leaves at {time} from platform {plat}.
A: [How much is a ticket|What does a ticket cost]?
B: [A single ticket is|It costs|That will be] {price} euros.
?A: [Do I have to change|Is it direct]?
?B: [Yes, once, in {from}|You change in {from}].
A: [I will take one|One ticket, please].
= {A} [buys|gets] a ticket to {to} for {price} euros. {B} [says|tells {himA}] that the train leaves at {time} from platform {plat}.
= {B} [tells|informs] {A} that the train to {to} leaves at {time} from platform {plat}, and {A} buys a ticket for {price} euros.
# hotel | city=city n=2-9 price=50-260 thing=roomthing
A: [I am looking for|I need|I would like] a room for {n} nights[|, please].
B: [Yes, we have one|We do]. It costs {price} euros a night.
A: Does it have {thing}?
B: [It does|Yes, of course], and [breakfast is included|the price includes breakfast].
?A: [May I pay by card|Can I pay by card]?
?B: [Of course|Yes, that is no problem].
A: [Good, I will take it|Then I will take it|I will take the room].
= {A} takes a room with {thing} for {n} nights. {B} says that it costs {price} euros a night [including breakfast|with breakfast].
= {A} [books|takes] a room for {n} nights at {price} euros a night. It has {thing}, and breakfast is included.
# clothes | item=clothing colour=colour colour2=colour price=20-190 off=5-15
A: [How much is this {colour} {item}|What does this {colour} {item} cost]?
B: It is {price} dollars[|, and very warm].
A: [That is too expensive for me|That is more than I wanted to spend]. [Is there a cheaper one|Can you make it cheaper]?
B: I can take {off} dollars off [the price|it]. [We also have it in|It also comes in] {colour2}.
A: [Then I will take the {colour2} one|All right, give me the {colour2} one].
= {A} thinks a(n) {item} for {price} dollars is too expensive. {B} takes {off} dollars off, and {A} [buys|takes] the {colour2} one.
= {A} [buys|takes] a(n) {colour2} {item} after {B} [takes|agrees to take] {off} dollars off the price of {price} dollars.
# repair | item=device day=weekday price=30-250 part=part
A: [My|Hello, my] {item} is broken. [Can you repair it|Could you have a look at it]?
B: [Let me see|One moment]. The {part} [is worn out|is damaged|has to be replaced].
A: [How much will it cost|What will that cost me]?
B: [About|Around] {price} dollars. [It will be ready on|You can collect it on] {day}.
?A: [That is quite a lot|That is a lot of money], but [all right|I need it].
A: [Fine, please repair it|Please go ahead].
= {A} brings a broken {item} to {B}. The {part} must be replaced, which costs [about|around] {price} dollars, and it will be ready on {day}.
= {B} will [repair|fix] {A}'s {item} by {day} for [about|around] {price} dollars because the {part} is [damaged|worn out].
# parcel | city=city days=2-20 thing=clothing day=weekday
A: [I ordered|Hello, I ordered] a(n) {thing} {days} days ago and it [has not arrived|is not here yet].
B: [Let me check|I will look it up]. Your parcel is [still|at the moment] in {city}.
A: [Why does it take so long|What happened]?
B: [There was a strike|There was heavy snow|A truck broke down]. It [will arrive|should be with you] on {day}.
?A: [I hope so|I really need it by then].
= {A} asks about a(n) {thing} ordered {days} days ago. {B} [finds|explains] that the parcel is still in {city} and will arrive on {day}.
= {A}'s {thing}, ordered {days} days ago, has not arrived. {B} says that it is in {city} and will come on {day}.
# library | subject=subject weeks=2-6 fine=2-15 n=2-5
A: [I would like|I want] to borrow {n} books on {subject}[|, please].
B: [You can keep them|The loan is] for {weeks} weeks. [But|However,] you [still have|have] a fine of {fine} dollars.
A: [Really|Oh], [what is it for|why is that]?
B: You [returned|brought back] your last book late.
A: [I am sorry, here is the money|Sorry about that, I will pay it now].
= {A} borrows {n} books on {subject} for {weeks} weeks and pays a fine of {fine} dollars for [returning a book late|a late book].
= {A} wants to borrow {n} books on {subject}. {B} [asks {himA} to pay|tells {himA} about] a fine of {fine} dollars for a late book and lends them for {weeks} weeks.
# gym | sport=sport day=weekday time=clock price=15-90
A: [Do you offer|Is there|Do you have] a(n) {sport} class for beginners[| here]?
B: [Yes, we have one|There is one] [every|each] {day} at {time}.
A: [And how much does it cost|What is the price]?
B: {price} euros a month. [The first class is free|You can try the first class for free].
A: [Great, I will come and try it|Good, then I will try it].
= {A} asks about a(n) {sport} class for beginners. {B} says it is every {day} at {time} for {price} euros a month, and {A} will [try|come to] the free first class.
= {B} tells {A} about the {sport} class [every {day}|on {day}s] at {time}, which costs {price} euros a month. {A} decides to try the free first class.
# taxi | city=city time=clock min=15-70 price=12-90
A: [I need a taxi|I want to order a taxi|I would like a taxi] to the airport at {time}[|, please].
B: [No problem|Certainly]. [How many bags do you have|Where should we pick you up]?
A: [Just one, and I am at the museum|At the museum, and I have one bag].
B: The ride takes {min} minutes and costs {price} dollars.
?A: [Good, I must not be late for my flight to {city}|Fine, my flight to {city} will not wait].
= {A} orders a taxi from the museum to the airport at {time}. {B} says that the ride takes {min} minutes and costs {price} dollars.
= {A} [orders|asks for] a taxi to the airport at {time}, and {B} [says|explains] that the ride from the museum costs {price} dollars and takes {min} minutes.
# flat | rooms=2-5 area=area price=400-1900 month=month
A: [Is the flat in the {area} still free?|I am calling about the flat in the {area}.]
B: [Yes, it is|It is still free]. It has {rooms} rooms and [a balcony|a new kitchen].
A: [How much is the rent|What is the rent]?
B: {price} euros a month[|, with heating]. You [could|can] move in in {month}.
?A: [Is it quiet|Are the neighbours quiet]?
?B: [Very quiet|Yes, most of the time].
A: [May I come and see it?|I would like to see it.]
= {A} is interested in a flat with {rooms} rooms in the {area}. {B} says that the rent is {price} euros a month and that it is free [in|from] {month}.
= {A} [wants|would like] to see a flat in the {area}. It has {rooms} rooms, costs {price} euros a month and is free from {month}.
# lost | item=lost colour=colour place=place time=clock
A: [I have lost|I think I lost|I cannot find] my {colour} {item}.
B: Where [did you last see it|did you have it last]?
A: [In|I had it in] the {place} at about {time}.
B: [Someone handed in|We have] a(n) {colour} {item} [an hour ago|this afternoon]. [Is this yours|Is it this one]?
A: [Yes, that is mine|Yes, it is]! [Thank you so much|I am so glad].
= {A} lost a(n) {colour} {item} in the {place} at about {time}. {B} [has it|shows it to {himA}] because someone handed it in.
= {A} is [looking for|asking about] a(n) {colour} {item} lost in the {place} at about {time}, and {B} [gives|hands] it back to {himA}.
"""
