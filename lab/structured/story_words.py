# ruff: noqa: E501 - a template or a word list is one line
"""The word problems, in the notation of stories."""

STORIES = """
# buy_give | a=10-60 b=5-40 c=2-30 T=things
{A} has {a} {T}. {He} [buys|gets|finds] {b} more and [then|later] gives {c} to {B}. How many {T} does {A} have [now|left|in the end]?
a + b: [First,|At first,|After this,] {A} has {=} {T}.
s1 - c: [Then|After giving {c} away,|After the gift,] {he} has {=} {T}.
# two_people | a=5-50 b=2-30 c=2-5 T=things
{A} has {a} {T}. {B} has {b} more {T} than {A}. How many {T} do they have [together|in total|altogether]?
a + b: {B} has {=} {T}.
a + s1: [Together|In total|Altogether] they have {=} {T}.
# times | a=3-25 b=2-4 c=2-9 T=things
{A} has {a} {T}. {B} has {b} times as many. {C} has {c} more than {B}. How many {T} does {C} have?
b * a: {B} has {=} {T}.
s1 + c: {C} has {=} {T}.
# times_total | a=3-25 b=2-4 T=things
{A} has {a} {T} and {B} has {b} times as many. How many {T} do [they|the two] have [together|in total]?
b * a: {B} has {=} {T}.
s1 + a: [Together|In total] they have {=} {T}.
# boxes | a=2-9 b=3-12 c=2-20 T=things
{A} has {a} boxes with {b} {T} in each. {He} [loses|gives away|sells] {c} of them. How many {T} [are left|does {he} still have]?
a * b: [At first there are|The boxes hold|In all there are] {=} {T}.
s1 - c: [Then|After that,|So] {=} {T} are left.
# boxes_extra | a=2-9 b=3-12 c=2-30 d=2-30 T=things
{A} packs {a} boxes with {b} {T} each. {He} has {c} more {T} on the table and gets {d} from {B}. How many {T} are there in total?
a * b: The boxes hold {=} {T}.
s1 + c: With the {T} on the table there are {=}.
s2 + d: With those from {B} there are {=} {T}.
# shop | a=2-9 b=2-9 c=2-9 d=2-9 F=fruit G=fruit
{A} buys {a} bags of {F} for {b} dollars each and {c} bags of {G} for {d} dollars each. How much does {he} [pay|spend]?
a * b: The {F} cost {=} dollars.
c * d: The {G} cost {=} dollars.
s1 + s2: [Together|In total|Altogether] {he} pays {=} dollars.
# change | a=2-9 b=2-12 n=20-100 I=clothing
{A} buys {a} [pairs of socks|notebooks|plants|cups] for {b} dollars each and pays with {n} dollars. How much [change does {he} get|money does {he} get back]?
a * b: {He} has to pay {=} dollars.
n - s1: {He} gets {=} dollars back.
# share | c=2-9 q=2-12 a=3-30 n=c*q-a T=things
{A} has {a} {T} and {B} has {n}. They [share|divide] all of them equally among {c} children. How many {T} does each child get?
a + n: There are {=} {T} in total.
s1 / c: Each child gets {=} {T}.
# save | a=3-12 b=3-10 c=5-60 I=device
{A} saves {a} dollars [a|every|each] week for {b} weeks. Then {he} spends {c} dollars on a(n) {I}. How many dollars [are left|does {he} have left]?
a * b: {He} saves {=} dollars.
s1 - c: [After buying the {I},|Then|After that] {he} has {=} dollars.
# earn | a=8-15 b=2-8 c=2-8 D=weekday E=weekday
{A} earns {a} dollars an hour. {He} works {b} hours on {D} and {c} hours on {E}. How much does {he} earn [in total|altogether]?
b + c: {He} works {=} hours.
a * s1: {He} earns {=} dollars.
# pages | a=60-190 b=5-20 c=2-7 S=subject
{A} reads a(n) {S} book with {a} pages. {He} reads {b} pages [a|each|every] day for {c} days. How many pages [are left|does {he} still have to read]?
b * c: In {c} days {he} reads {=} pages.
a - s1: [There are|That leaves] {=} pages.
# bus | a=10-50 b=2-9 c=2-15 d=2-15 P=city
A bus [leaves|starts in] {P} with {a} people. At the first stop {c} people get off and {d} get on. At the second stop {b} people get off. How many people are on the bus [now|then]?
a - c: After {c} people get off there are {=} people.
s1 + d: After {d} people get on there are {=} people.
s2 - b: After the second stop there are {=} people.
# garden | a=3-9 b=3-12 c=2-20 F=fruit
{A} has {a} rows of {b} trees in {his} garden. {He} [cuts down|removes] {c} trees and plants {d} new ones to grow {F}. How many trees are there now?
a * b: [At first|In the beginning] there are {=} trees.
s1 - c: Without the old ones there are {=} trees.
s2 + d: With the new ones there are {=} trees.
# bake | a=2-6 b=6-12 c=3-40 F=food D=weekday
On {D} {A} bakes {a} trays of {b} cookies. {His} friends eat {c} of them, and {he} gives {d} to {B}. How many cookies are left?
a * b: {He} bakes {=} cookies.
s1 - c: After {his} friends eat there are {=} cookies.
s2 - d: After giving some to {B} {he} has {=} cookies.
# half | h=3-40 a=2*h b=2-20 T=things
{A} has {a} {T}. {He} gives half of them to {B} and then [finds|buys|gets] {b} more. How many {T} does {A} have now?
a / 2: Half of the {T} are {=}.
s1 + b: [Then|With the new ones] {he} has {=} {T}.
# groups | c=2-9 q=2-12 n=c*q a=2-9 S=sport
{n} children want to play {S}. They form {c} equal teams. {a} more children join each team. How many children are in each team [now|in the end]?
n / c: [At first|In the beginning] each team has {=} children.
s1 + a: [Then|In the end] each team has {=} children.
# farm | a=3-20 b=2-4 c=2-15 N=animal
A farmer has {a} cows. {He} has {b} times as many sheep and {c} fewer goats than sheep. How many goats [are there|does the farmer have]?
b * a: There are {=} sheep.
s1 - c: There are {=} goats.
# drive | a=20-60 b=2-3 c=5-60 P=city Q=city
{A} drives from {P} to {Q}. {He} drives {a} kilometers an hour for {b} hours and then {c} more kilometers. How [far|many kilometers] does {he} drive [in total|altogether]?
a * b: In {b} hours {he} drives {=} kilometers.
s1 + c: [In total|Altogether] {he} drives {=} kilometers.
# age | a=4-30 b=2-3 c=2-12
{A} is {a} years old. {B} is {b} times as old as {A}. {C} is {c} years younger than {B}. How old is {C}?
b * a: {B} is {=} years old.
s1 - c: {C} is {=} years old.
# age_future | a=4-40 b=2-20 c=2-15
{A} is {a} years old and {B} is {b} years older. How old will {B} be in {c} years?
a + b: {B} is {=} years old now.
s1 + c: In {c} years {B} will be {=} years old.
# tickets | a=2-5 b=8-15 c=2-6 d=3-8
{a} adults and {c} children visit a museum in {P}. A ticket costs {b} dollars for an adult and {d} dollars for a child. How much do they pay [together|in total]?
a * b: The adults pay {=} dollars.
c * d: The children pay {=} dollars.
s1 + s2: [Together|In total] they pay {=} dollars.
# water | a=2-9 b=2-9 c=7-7 D=clothing
{A} drinks {a} glasses of water a day and {B} drinks {b}. How many glasses do they drink [together|in total] in a week?
a + b: [Each|Every] day they drink {=} glasses.
s1 * 7: In a week they drink {=} glasses.
# discount | a=30-150 b=5-25 c=2-20 I=device
A(n) {I} costs {a} dollars. It is {b} dollars cheaper [this week|on {D}], but {A} pays {c} dollars for delivery. How much does {he} pay?
a - b: The cheaper price is {=} dollars.
s1 + c: With delivery {he} pays {=} dollars.
# race | a=3-12 b=2-6 c=1-9 D=weekday E=weekday
{A} runs {a} kilometers on {D}. On {E} {he} runs {b} kilometers more, and on {Z} {he} runs {c} kilometers. How many kilometers does {he} run in total?
a + b: On {E} {he} runs {=} kilometers.
a + s1: On the two days {he} runs {=} kilometers.
s2 + c: [In total|Altogether] {he} runs {=} kilometers.
# library | a=40-120 b=5-30 c=5-30 d=5-30 D=weekday
A library has {a} books on {S}. On {D} {b} of them are borrowed and {c} are brought back. Then {d} new ones arrive. How many are [in the library|there] now?
a - b: After the loans there are {=} books.
s1 + c: With those brought back there are {=} books.
s2 + d: With the new ones there are {=} books.
# machine | a=3-12 b=2-6 c=2-6 T=things
A machine makes {a} {T} [a|every|each] minute. It runs for {b} minutes in the morning and {c} minutes in the evening. How many {T} does it make?
b + c: It runs for {=} minutes.
a * s1: It makes {=} {T}.
# paint | c=2-6 q=3-12 n=c*q a=2-9 O=colour
{A} has {n} {O} {T}. {He} puts them into {c} equal piles and then takes {d} from the first pile. How many {T} are in the first pile [now|then]?
n / c: Each pile has {=} {T}.
s1 - d: [Then|After that] the first pile has {=} {T}.
# triple | a=4-20 b=2-15 T=things
{A} [collects|finds] {a} {T} on {D}, {b} more than that on {E} and twice as many on {Z} as on {E}. How many does {he} [collect|find] on {Z}?
a + b: On {E} it is {=} {T}.
2 * s1: On {Z} it is {=} {T}.
# left_money | a=40-150 b=5-30 c=5-30 d=5-30 I=clothing
{A} has {a} dollars. {He} spends {b} dollars on a(n) {I} and {c} dollars on {F}. Then {B} gives {him} {d} dollars. How many dollars does {he} have now?
a - b: After the {I} {he} has {=} dollars.
s1 - c: After the {F} {he} has {=} dollars.
s2 + d: With the money from {B} {he} has {=} dollars.
"""
