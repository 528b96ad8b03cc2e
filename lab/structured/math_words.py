# ruff: noqa: E501 - a template or a word list is one line
"""Short questions of school mathematics with a follow-up each, in the notation of stories."""

MATH = """
# percent | k=1-9 p=10*k q=2-19 n=10*q b=2-30
[What is|Find|Calculate] {p} percent of {n}[, please|].
n / 10: [Ten percent of {n} is|10 percent is] {=}.
k * s1: [Then|So] {p} percent is {=}.
> [Now add|Add] {b} to [that result|your result|the result]. What do you get?
s2 + b: [Adding {b} gives|We get] {=}.
# quarter | q=2-40 n=4*q b=2-9
[What is|Find|Calculate] 25 percent of {n}[, please|].
n / 4: 25 percent is [one quarter, so we divide by 4|a quarter, which means dividing by 4]: {=}.
> [What is|And what is] 75 percent of {n}?
3 * s1: 75 percent is [three quarters|three times as much], so {=}.
# half_off | q=6-90 n=2*q b=2-20
A ticket costs {n} dollars. [What does it cost|How much is it] [with 50 percent off|at half price]?
n / 2: [Half price means dividing by 2|We divide the price by 2]: {=} dollars.
> [There is also|Now there is] a fee of {b} dollars. What is the [total|final] price?
s1 + b: [With the fee it is|The price with the fee is] {=} dollars.
# rectangle | a=3-15 b=3-12 c=1-4
[What is|Find|Calculate] the area of a rectangle [that is {a} meters long and {b} meters wide|with a length of {a} meters and a width of {b} meters].
a * b: The area is [length times width|the product of the sides], so {=} square meters.
> [What if the length grows|And if the length grows] by {c} meters? [Give the new area|Find the new area].
a + c: The new length is {=} meters.
s2 * b: The new area is {=} square meters.
# perimeter | a=3-50 b=3-40 c=2-9
[What is|Find|Calculate] the perimeter of a rectangle with sides of {a} and {b} meters.
a + b: [Two sides together are|One long and one short side are] {=} meters.
2 * s1: The perimeter is [twice that|two times that], so {=} meters.
> A fence of that length needs {c} more meters for a gate. How long is [it|the fence] then?
s2 + c: [With the gate it is|The fence is] {=} meters.
# square | a=3-13 b=2-20
[What is|Find|Calculate] the area of a square with a side of {a} meters.
a * a: The area is [side times side|the side times itself], so {=} square meters.
> [What is|And what is] its perimeter?
4 * a: A square has four equal sides, so [the perimeter is |it is ]{=} meters.
# linear | a=2-9 q=2-15 b=2-40 c=a*q+b e=2-9
Solve [for x|the equation]: {a}x + {b} = {c}.
c - b: [We subtract|Subtract] {b} from both sides: {a}x = {s1}, because {=}.
s1 / a: [We divide|Divide] both sides by {a}: x = {s2}, because {=}.
> What is {e} times x?
e * s2: [With x = {s2} we get|As x is {s2}, it is] {=}.
# linear_minus | a=2-9 q=3-20 b=2-20 c=a*q-b e=2-30
Solve [for x|the equation]: {a}x - {b} = {c}.
c + b: [We add|Add] {b} to both sides: {a}x = {s1}, because {=}.
s1 / a: [We divide|Divide] both sides by {a}: x = {s2}, because {=}.
> What is x plus {e}?
s2 + e: [With x = {s2} we get|As x is {s2}, it is] {=}.
# average3 | m=5-50 a=4-60 b=4-60 c=3*m-a e=2-15
[What is|Find|Calculate] the average of {a}, {b} and {c}.
a + b: [First we add|We add the first two numbers]: {=}.
s1 + c: [Then|With the third number]: {=}.
s2 / 3: [There are three numbers, so|We divide by 3, and] the average is {=}.
> [If every number grows by {e}|If we add {e} to every number], what is the new average?
s3 + e: The average grows by [the same amount|{e} too], so it is {=}.
# average2 | m=5-70 a=4-90 c=2*m-a e=2-9
[What is|Find|Calculate] the average of {a} and {c}.
a + c: [First we add|The sum is]: {=}.
s1 / 2: [There are two numbers, so|We divide by 2, and] the average is {=}.
> [Multiply|Now multiply] the average by {e}.
s2 * e: [We get|The product is] {=}.
# sequence | a=2-40 b=2-19 f=1*b+a c=2*b+a e=3*b+a
[What comes next|What is the next number] in the sequence {a}, {f}, {c}, {e}?
e - c: [Each number grows|The numbers grow] by the same step: {=}.
e + s1: The next number is {=}.
> And the number after [that|it]?
s2 + s1: [We add the step again|The step is the same]: {=}.
# speed | a=10-60 b=2-9 c=2-9
A [train|car|bus|ship] [goes|travels] {a} kilometers an hour. How far does it go in {b} hours?
a * b: Distance is speed times time, so {=} kilometers.
> It then goes {c} more kilometers. How far [is that in total|did it go in total]?
s1 + c: [In total it goes|The whole way is] {=} kilometers.
# speed_back | b=2-9 q=4-40 a=b*q c=2-5
A [cyclist|boat|tram|truck] [goes|travels] {a} kilometers in {b} hours. What is the [speed|average speed]?
a / b: Speed is distance [divided by|over] time, so {=} kilometers an hour.
> How far does it get in {c} hours?
s1 * c: At that speed it is {=} kilometers.
# angles | a=20-100 b=20-70 c=2-9
Two angles of a triangle are {a} and {b} degrees. [What is|Find] the third angle.
a + b: The two angles [make|add up to] {=} degrees.
180 - s1: [All angles of a triangle make 180 degrees, so|The three angles make 180 degrees, and] the third is {=} degrees.
> [How much larger|How much more] is 180 than the third angle?
180 - s2: The difference is {=} degrees.
# divide | b=2-9 q=3-20 a=b*q c=2-9
[What is|Calculate|Work out] {a} divided by {b}?
a / b: [We get|The result is] {=}.
> [Multiply|Now multiply] the result by {c}.
s1 * c: [We get|The product is] {=}.
# order | a=2-50 b=2-9 c=2-12 e=2-20
[What is|Calculate|Work out] {a} + {b} * {c}?
b * c: [Multiplication comes first|We multiply first]: {=}.
a + s1: [Then we add|Now the sum]: {=}.
> [Subtract|Now subtract] {e} from [the result|that].
s2 - e: [We get|The difference is] {=}.
# brackets | a=2-15 b=2-12 c=2-8 e=2-20
[What is|Calculate|Work out] ({a} + {b}) * {c}?
a + b: [The brackets come first|First the brackets]: {=}.
s1 * c: [Then we multiply|Now the product]: {=}.
> [Add|Now add] {e} to [the result|that].
s2 + e: [We get|The sum is] {=}.
# hours | a=1-3 b=5-55 c=2-20
How many minutes are {a} hours and {b} minutes?
a * 60: An hour has 60 minutes: {=}.
s1 + b: [With the other minutes it is|Adding the rest gives] {=} minutes.
> [Now take away|Take away] {c} minutes. How many [are left|remain]?
s2 - c: [There are|That leaves] {=} minutes.
# weeks | a=2-20 b=1-6 c=2-15
How many days are {a} weeks and {b} days?
a * 7: A week has 7 days: {=}.
s1 + b: [With the other days it is|Adding the rest gives] {=} days.
> How many days are left after {c} days have passed?
s2 - c: [There are|That leaves] {=} days.
# triangle | h=2-10 a=2*h b=3-18 c=2-9
[What is|Find|Calculate] the area of a triangle with a base of {a} meters and a height of {b} meters.
a / 2: [Half of the base is|We halve the base]: {=}.
s1 * b: [Half the base times the height|Then we multiply by the height]: {=} square meters.
> How large are two such triangles [together|in total]?
2 * s2: [Together they have|Two of them have] {=} square meters.
# cube | a=2-6 b=2-7 c=2-8
[What is|Find|Calculate] the volume of a box that is {a} meters wide, {b} meters long and {c} meters high.
a * b: The bottom [has|covers] {=} square meters.
s1 * c: The volume is [that times the height|bottom times height], so {=} cubic meters.
> And [the volume of half the box|half of that volume]?
s2 / 2: Half of it is {=} cubic meters.
# fraction | c=3-9 q=2-20 n=c*q e=2-8
[What is|Find|Calculate] {e}/{c} of {n}?
n / c: One part of {c} is {=}.
s1 * e: {e} such parts are {=}.
> How much more is {n} than [the result|that]?
n - s2: [The difference is|It is more by] {=}.
"""
