# ruff: noqa: E501 - a template or a word list is one line
"""Short texts with facts to extract: their slots, their wordings, their fields, and follow-up questions.

A kind starts with `# name | slots | fields`; a field is `label=slot`. `T:` lines are ways to write the
text, `Q:` a follow-up question with its answer after ` => `.
"""

TEXTS = """
# order | who=person n=2-40 item=goods city=city price=20-900 day=weekday | customer=who item=item quantity=n city=city total=price
T: {who} from {city} [ordered|has ordered|bought] {n} {item} [on|last] {day}. The [total|bill] [was|came to] {price} dollars.
T: [On|Last] {day} we [received|got] an order from {who} in {city}: {n} {item} for {price} dollars [in total|altogether].
Q: [When was the order made|On which day was the order made]? => [The order was made|{who} ordered] on {day}.
Q: [Where does the customer live|Where is the customer from]? => [The customer, {who},|{who}] [lives in|is from] {city}.
Q: How much did {who} pay? => {who} [paid|had to pay] {price} dollars for {n} {item}.
# job | who=person job=job city=city years=2-30 subject=subject age=22-64 | name=who age=age job=job city=city experience=years
T: {who} is {age} years old and [works|has a job] as a(n) {job} in {city}. [After studying|Having studied] {subject}, {he} has [done this|done the job] for {years} years.
T: The {job} {who} lives in {city}. At the age of {age}, {he} has {years} years of experience. At university {he} studied {subject}.
Q: What did {who} study? => {who} [studied|has studied] {subject} [at university|before working as a(n) {job}].
Q: How [long|many years] has {who} worked as a(n) {job}? => {who} has worked as a(n) {job} for {years} years.
Q: How old is {who}? => {who} is {age} years old and [lives|works] in {city}.
# event | title=event city=city month=month date=1-28 time=clock price=3-60 | event=title city=city date=when time=time price=price
T: [The|This year, the] {title} [takes place|will be held] in {city} on {when}. [The doors open|It starts] at {time}, and a ticket costs {price} euros.
T: Do not miss the {title} on {when}! [Come to|We meet in] {city} at {time}. [Tickets are|A ticket is] {price} euros[| each].
Q: When does [it|the {title}] start? => [The {title}|It] [starts|begins] on {when} at {time}.
Q: How much are {n2} tickets? => One ticket costs {price} euros, so {n2} tickets cost {n2} * {price} = {price2} euros.
Q: Where does it take place? => [The {title}|It] [takes place|is held] in {city}.
# flight | code=code from=city to=city day=weekday time=clock gate=2-60 seats=40-320 | flight=code origin=from destination=to departure=time gate=gate
T: Flight {code} from {from} to {to} [leaves|departs] on {day} at {time} from gate {gate}. There are {seats} seats on [board|the plane].
T: [Attention please|Dear passengers], flight {code} to {to} is ready at gate {gate}. [It|The plane] has {seats} seats and leaves {from} at {time} on {day}.
Q: On which day does it leave? => [Flight {code}|It] leaves on {day} at {time}.
Q: How many seats [are there|does the plane have]? => [The plane|Flight {code}] has {seats} seats.
Q: Where does the flight go? => [Flight {code}|It] [goes|flies] from {from} to {to}.
# film | title=title who=person year=1960-2023 country=country min=80-190 stars=1-5 | title=title director=who year=year country=country length=min
T: "{title}" is a film from {country} that {who} [directed|made] in {year}. It [lasts|runs for] {min} minutes and [has|got] {stars} of 5 stars.
T: In {year} {who} [made|directed] "{title}" in {country}. The film [is {min} minutes long|lasts {min} minutes], and critics [give|gave] it {stars} of 5 stars.
Q: How many stars did it get? => ["{title}"|The film] got {stars} of 5 stars.
Q: Who [directed|made] the film? => {who} [directed|made] "{title}" in {year}.
Q: Is it longer than two hours? => [{yes}, the film lasts|{yes}, it lasts] {min} minutes.
# car | brand=brand colour=colour year=1995-2023 km=5-190 price=9-60 city=city who=person | brand=brand colour=colour year=year mileage=km000 price=price000
T: For sale in {city}: a(n) {colour} {brand} [built in|from] {year} with {km000} kilometers. [The price is|It costs] {price000} euros. [Call|Contact] {who}.
T: {who} [sells|is selling] a(n) {colour} {brand} in {city}. The car [was built in|is from] {year}, has {km000} kilometers and costs {price000} euros.
Q: Who sells the car? => {who} [sells|is selling] the {colour} {brand} in {city}.
Q: Where is the car? => The {brand} is [for sale in|in] {city}.
Q: What does the car cost? => [The {colour} {brand}|The car] costs {price000} euros.
# course | subject=subject who=person day=weekday time=clock room=2-90 weeks=3-15 | course=subject teacher=who day=day time=time room=room
T: The {subject} course [with|of] {who} [meets|takes place] every {day} at {time} in room {room}. It [lasts|goes on for] {weeks} weeks.
T: {who} [teaches|will teach] {subject} on {day}s at {time}. [Students meet|The class is] in room {room} for {weeks} weeks.
Q: How long does the course last? => The {subject} course lasts {weeks} weeks.
Q: Who teaches [it|the course]? => {who} teaches {subject} every {day}.
Q: Where does it take place? => The {subject} course takes place in room {room}.
# recipe | dish=dish n=2-9 min=10-90 ing=ingredient gr=50-450 ing2=ingredient who=person | dish=dish people=n time=min ingredient=ing cook=who
T: {who} [makes|cooks] {dish} for {n} people in {min} minutes. [The main ingredient is|It is made mainly of] {ing}, {gr} grams of it, with a little {ing2}.
T: [For|To make] {dish} for {n} people, {who} [takes|uses] {gr} grams of {ing} as the main ingredient and a little {ing2}. It [takes|is ready in] {min} minutes.
Q: How many grams of {ing} are needed? => [{who} uses|The {dish} needs] {gr} grams of {ing}.
Q: How long does it take? => The {dish} [takes|is ready in] {min} minutes.
Q: What else is in it? => [There is also|It also has] a little {ing2} in the {dish}.
# patient | who=person age=18-90 body=body days=2-30 drug=drug day=weekday | patient=who age=age pain=body days=days medicine=drug
T: [The patient|Our patient] {who}, {age} years old, has had pain in the {body} for {days} days. [We gave|The doctor gave] {him} {drug}. {He} [comes back|returns] on {day}.
T: {who} ({age}) [came|came to us] with pain in the {body}, which began {days} days ago. {He} got {drug} and will [return|come back] on {day}.
Q: When will {who} [return|come back]? => {who} will [return|come back] on {day}.
Q: Where is the pain? => {who} has pain in the {body}.
Q: What medicine did {he} get? => {who} got {drug} for the pain in the {body}.
"""
MORE = """
goods: chairs;tables;lamps;mirrors;desks;shelves;carpets;sofas;cups;plates;towels;blankets;candles;baskets
dish: pizza;soup;salad;curry;stew;lasagna;pasta;fried rice;risotto;chili;goulash;ramen
event: Jazz Night;Book Fair;Flower Market;Chess Open;Film Week;Food Festival;Science Day;Winter Concert;Poetry Evening;Art Fair
title: The Long River;Blue Winter;Two Letters;A Quiet House;The Last Train;Paper Moon Road;Seven Doors;Salt and Stone;The Glass Hill
brand: Fiat;Ford;Volvo;Honda;Toyota;Skoda;Mazda;Kia;Opel;Seat
ingredient: rice;butter;cream;garlic;flour;olive oil;cheese;beans;lentils;spinach;pumpkin
body: knee;back;left arm;right shoulder;neck;foot;stomach;wrist
drug: a cream;some tablets;a syrup;some drops;a strong painkiller
"""
