# ruff: noqa: E501 - a template or a word list is one line
"""Dialogues of friends, families, students and colleagues, in the notation of dialogue_scenes_service."""

LIFE = """
# party | day=weekday time=evening food=food event=event
A: [I am having|We are having|I am planning] a(n) {event} on {day}. [Can you come|Would you like to come|Will you join us]?
B: [I would love to|With pleasure|Sure]. [What time|When does it start]?
A: [At {time}|It starts at {time}], at my [place|house].
B: [Shall I bring anything|Can I bring something]?
A: [You could bring|Maybe bring] some {food}[|, if you like].
?B: [No problem, I will|I will do that].
= {A} invites {B} to a(n) {event} on {day} at {time}. {B} will [come|be there] and bring some {food}.
= {B} [agrees to come|will come] to {A}'s {event} on {day} at {time} and [will bring|brings] some {food}.
# interview | job=job years=2-15 city=city month=month
B: [Thank you for coming|Welcome]. [Why do you want to work here|Why did you apply for this job]?
A: [I have worked|I worked] as a(n) {job} for {years} years in {city} and [I want something new|I am ready for a change].
B: [What is your greatest strength|What are you good at]?
A: [I stay calm under pressure|I am calm when things get busy].
B: [When could you start|And when are you free to start]?
A: [In {month}|I can start in {month}].
= {B} interviews {A}, who has worked as a(n) {job} for {years} years in {city}. {A} [stays calm|is calm] under pressure and can start in {month}.
= {A} tells {B} in a job interview about {years} years of work as a(n) {job} in {city} and [can start|is free to start] in {month}.
# exam | subject=subject day=weekday place=place time=clock
A: [Are you ready for|How do you feel about|Have you studied for] the {subject} exam on {day}?
B: [Not at all|Not really]. [I do not understand half of it|I missed too many lessons].
A: [We could|Let us|Why don't we] study together in the {place}.
B: [That would help a lot|Great idea]. [When|What time]?
A: [Tomorrow at {time}|How about tomorrow at {time}]?
?B: [Good, I will bring my notes|Fine, see you there].
= {B} is not ready for the {subject} exam on {day}. {A} and {B} will [study together|meet to study] in the {place} tomorrow at {time}.
= {A} [offers|suggests] to study with {B} for the {subject} exam on {day}, and they will meet in the {place} tomorrow at {time}.
# late | min=10-90 event=meeting cause=delay time=clock
A: [Where are you|Are you coming]? The {event} [starts|begins] at {time}.
B: [I am sorry|Sorry], [I am late because of|I am stuck because of] {cause}.
A: [How long will it take you|When will you be here]?
B: [About|I think about] {min} minutes. [Can you start without me|Please start without me].
A: [All right|Fine], [I will tell the others|I will let everyone know].
= {B} will be about {min} minutes late for the {event} at {time} because of {cause}. {A} will [tell the others|let the others know] and start without {himB}.
= Because of {cause}, {B} will come about {min} minutes late to the {event} at {time}, and {A} will start without {himB}.
# trip | city=city days=3-14 price=200-900 means=means month=month
A: [I want|I am planning|I would like] to go to {city} in {month}. [Do you want to come|Will you come with me]?
B: [For how long|How long will you stay]?
A: [For {days} days|{days} days]. We would [go|travel] by {means}.
B: [How much will it cost|What will we have to pay]?
A: [About|Around] {price} euros each[|, with the hotel].
?B: [I can afford that|That is not too bad].
B: [Then I am in|Good, I will come with you].
= {A} plans to go to {city} by {means} in {month} for {days} days. {B} will [come along|join {himA}] for [about|around] {price} euros.
= {A} and {B} will travel to {city} by {means} for {days} days in {month}, which costs [about|around] {price} euros each.
# pet | animal=animal name=petname day=weekday days=3-20 food=petfood
A: [Could you look after|Can you take care of|Would you mind looking after] my {animal} {name}[| for a while]?
B: [Sure|Gladly|Of course]. [When do you leave|When are you going away]?
A: [On {day}|I leave on {day}], for {days} days. [{name} eats|It only eats] {food}.
B: [Is there anything else I should know|Anything else]?
A: [No, that is all|{name} needs fresh water every day].
= {B} will [look after|take care of] {A}'s {animal} {name} for {days} days from {day}. {name} eats {food}.
= {A} asks {B} to [look after|take care of] the {animal} {name}, which eats {food}, for {days} days from {day}.
# film | genre=genre time=evening day=weekday food=food
A: [Shall we see|Do you want to see|How about seeing] the new {genre} on {day}?
B: I [do not like|am not fond of] {genre} films. [Let us eat out|I would rather eat out].
A: [Good idea|Why not]. [What would you like|What do you feel like]?
B: [I would love some|I feel like] {food}. [Shall we meet|Let us meet] at {time}.
A: [Fine, see you then|See you at {time}].
= {A} suggests a(n) {genre} on {day}, but {B} [does not like|is not fond of] such films. They will [eat|have] {food} together at {time} instead.
= {A} and {B} decide to have {food} on {day} at {time} because {B} [does not like|is not fond of] {genre} films.
# homework | subject=subject n=3-20 day=weekday
A: [Have you finished|Did you do|Are you done with] the {subject} homework?
B: [Only half of it|Not yet]. Task {n} is [too hard|very hard] for me.
A: [I can explain it|I will show you how it works|Let me help you] after school.
B: [Thanks|Thank you]! We have to hand it in on {day}[|, right]?
A: [Right|Exactly], so [there is enough time|we should be quick].
= {B} finds task {n} of the {subject} homework too hard. {A} will [explain it|help {himB}] after school because it is due on {day}.
= {A} will help {B} after school with task {n} of the {subject} homework, which [is due|must be handed in] on {day}.
# move | city=city job=job month=month price=400-1500
A: [I am moving|I will move|Guess what, I am moving] to {city} in {month}.
B: [Really|What a surprise]! [Why|What for]?
A: [I found|I got] a job as a(n) {job} there.
B: [Congratulations|I am happy for you]. [Do you have a flat|Have you found a flat]?
A: Yes, [a small one|a nice one] for {price} euros a month.
?B: [I will visit you|I will miss you].
= {A} is moving to {city} in {month} to work as a(n) {job}. {A} has [found|rented] a flat for {price} euros a month.
= {A} [tells|informs] {B} about a new job as a(n) {job} in {city}. {A} will move in {month} and pay {price} euros a month for a flat.
# gift | who=relative item=clothing price=15-90 colour=colour day=weekday
A: [What should we give my {who}|What could we buy my {who}] for [the birthday|the birthday party] on {day}?
B: [How about|Maybe] a(n) {colour} {item}[?|, that is always useful.]
A: [How much would that be|Is that expensive]?
B: [About|Around] {price} dollars. [We could share the cost|We can each pay half].
A: [Good|Great], [I will buy it tomorrow|I will get it tomorrow].
= {A} and {B} will [give|buy] {hisA} {who} a(n) {colour} {item} for about {price} dollars for the birthday on {day}. They will share the cost.
= For the birthday of {hisA} {who} on {day}, {A} will buy a(n) {colour} {item} for about {price} dollars and share the cost with {B}.
# meeting | day=weekday day2=weekday time=clock topic=topic reason=excuse
A: [Can we talk about|We need to discuss|I want to discuss] the {topic} on {day}.
B: [I am afraid I cannot|That is difficult]. I have to {reason}[| on {day}].
A: [What about|How about|Then maybe] {day2}?
B: {day2} [is fine|works for me], but not before {time}.
A: [Good, {time} then|Then let us say {time}].
?B: [I will book a room|I will send the papers before].
= {A} wants to discuss the {topic} on {day}, but {B} has to {reason}. They will [meet|talk] on {day2} at {time} instead.
= {A} and {B} will discuss the {topic} on {day2} at {time} because {B} has to {reason} on {day}.
# bike | item=vehicle price=90-900 off=5-60 colour=colour years=2-9
A: [Is this {colour} {item} for sale?|I saw that you sell a(n) {colour} {item}.]
B: [Yes, it is|Right]. It is {years} years old and I [want|am asking] {price} dollars for it.
A: Would you [take|accept] {off} dollars less?
B: [Hmm, it is in good shape|It is as good as new]. [But all right|Well, all right].
A: [Great, I will pay in cash|Good, here is the money].
= {A} [buys|gets] a(n) {colour} {item} that is {years} years old from {B} for {off} dollars less than the [asking price|price] of {price} dollars.
= {B} asks for {price} dollars for a(n) {colour} {item} that is {years} years old and sells it to {A} for {off} dollars less.
# cook | food=food n=3-9 item=ingredient time=evening
A: [I am cooking|I want to make|I will make] {food} for {n} people tonight, but I have no {item}[| left].
B: [I can bring some|I have some at home]. [How much do you need|When do you need it]?
A: [Please be here by|I need it by|I have to start at] {time}.
B: [No problem|That is easy]. [May I stay for dinner|Is there a plate for me too]?
A: [Of course you can|Of course].
= {A} needs {item} to cook {food} for {n} people. {B} will bring some by {time} and [stay for|join the] dinner.
= {B} will bring {A} some {item} by {time} for the {food} that {A} is [cooking|making] for {n} people, and [stay|will stay] for dinner.
# lesson | skill=skill day=weekday time=clock price=10-60 weeks=4-20
A: [I heard that you teach|Do you give lessons in|Someone told me that you teach] {skill}.
B: [That is right|Yes, I do]. [Have you done it before|Are you a beginner]?
A: [Only for|I did it for] {weeks} weeks, [long ago|at school].
B: [We could start on|I have time on] {day} at {time}. [A lesson is|I ask for] {price} dollars.
A: [That suits me well|That is fine with me].
= {A} wants to learn {skill} from {B} after {weeks} weeks of practice [at school|in the past]. The first lesson is on {day} at {time} and costs {price} dollars.
= {B} will give {A} a lesson in {skill} on {day} at {time} for {price} dollars. {A} has practised for {weeks} weeks before.
# noise | noise=noise time=night day=weekday
A: [Excuse me|Sorry to bother you], [could you stop|I can hear] the {noise}[| in my flat]? It is [already|past] {time}.
B: [I am sorry|Oh, I did not know that], [the walls are thin|was it so loud]?
A: [I have to get up early for work on {day}|I need to sleep because I work on {day}].
B: [I will be quiet now|I will stop at once]. [It will not happen again|I promise to be careful].
?A: [Thank you for understanding|Thanks, good night].
= {A} complains about the {noise} at {time} because {A} has to work on {day}. {B} [says sorry|apologizes] and will be quiet.
= {B} [promises|agrees] to stop the {noise} after {A} complains at {time} that {A} has to work on {day}.
"""
