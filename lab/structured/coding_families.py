# ruff: noqa: E501 - a template or a word list is one line
"""Families of small Python functions: what each does, its code, and a variant that a follow-up asks for.

A family starts with `# kind | names | description`. `kind` says what the parameter holds and {p} is the
parameter, {n} a number, {i} the loop variable. Then come the code, `> ` with a change that can be asked
for, and the changed code. {f} is the name of the function.
"""

FAMILIES = """
# numbers | total,sum_of,add_up | adds up all {w}
    total = 0
    for {i} in {p}:
        total += {i}
    return total
> return 0 only for an empty list and otherwise the average
    if not {p}:
        return 0
    return sum({p}) / len({p})
# numbers | count_above,number_above | counts the {w} that are larger than {n}
    count = 0
    for {i} in {p}:
        if {i} > {n}:
            count += 1
    return count
> return a list of those {w} instead of their number
    return [{i} for {i} in {p} if {i} > {n}]
# numbers | count_below,number_below | counts the {w} that are smaller than {n}
    return sum(1 for {i} in {p} if {i} < {n})
> return True if there is at least one such value
    return any({i} < {n} for {i} in {p})
# numbers | even,keep_even,select_even | returns the even {w}
    return [{i} for {i} in {p} if {i} % 2 == 0]
> return the odd {w} instead
    return [{i} for {i} in {p} if {i} % 2 == 1]
# numbers | multiples,divisible | returns the {w} that are divisible by {n}
    return [{i} for {i} in {p} if {i} % {n} == 0]
> return how many there are
    return sum(1 for {i} in {p} if {i} % {n} == 0)
# numbers | largest,highest,maximum | finds the largest of the {w} without using max
    best = {p}[0]
    for {i} in {p}:
        if {i} > best:
            best = {i}
    return best
> find the smallest one instead
    best = {p}[0]
    for {i} in {p}:
        if {i} < best:
            best = {i}
    return best
# numbers | scale,multiply | multiplies each of the {w} by {n}
    return [{i} * {n} for {i} in {p}]
> add {n} to each one instead
    return [{i} + {n} for {i} in {p}]
# numbers | shift,raise | adds {n} to each of the {w}
    result = []
    for {i} in {p}:
        result.append({i} + {n})
    return result
> write it as a list comprehension
    return [{i} + {n} for {i} in {p}]
# numbers | top,best | returns the {n} largest {w} in descending order
    ordered = sorted({p}, reverse=True)
    return ordered[:{n}]
> return the {n} smallest {w} in ascending order
    ordered = sorted({p})
    return ordered[:{n}]
# numbers | squares_of,square | returns the square of each of the {w}
    return [{i} ** 2 for {i} in {p}]
> return the sum of the squares
    return sum({i} ** 2 for {i} in {p})
# numbers | running,cumulative | returns the running total of the {w}
    total = 0
    result = []
    for {i} in {p}:
        total += {i}
        result.append(total)
    return result
> return only the last total
    total = 0
    for {i} in {p}:
        total += {i}
    return total
# numbers | spread,span,range_of | returns the difference between the largest and the smallest of the {w}
    return max({p}) - min({p})
> return both values as a tuple
    return min({p}), max({p})
# numbers | clip,limit | replaces each of the {w} above {n} by {n}
    return [min({i}, {n}) for {i} in {p}]
> replace those below {n} instead
    return [max({i}, {n}) for {i} in {p}]
# numbers | has,contains | checks whether {n} is among the {w}
    for {i} in {p}:
        if {i} == {n}:
            return True
    return False
> return how often it occurs
    return {p}.count({n})
# numbers | all_above,every_above | checks whether all {w} are larger than {n}
    return all({i} > {n} for {i} in {p})
> check whether any of them is
    return any({i} > {n} for {i} in {p})
# numbers | mean,average | returns the average of the {w}
    return sum({p}) / len({p})
> round it to {n} digits
    return round(sum({p}) / len({p}), {n})
# numbers | unique,distinct | returns the {w} without duplicates, in the same order
    result = []
    for {i} in {p}:
        if {i} not in result:
            result.append({i})
    return result
> return them sorted
    return sorted(set({p}))
# numbers | skip,drop | returns the {w} without the first {n}
    return {p}[{n}:]
> leave out the last {n} instead
    return {p}[:-{n}]
# numbers | every_nth,pick_every | returns every item of the {w} at a distance of {n}
    return {p}[::{n}]
> return them in reverse order
    return {p}[::{n}][::-1]
# numbers | chunks_of,split | splits the {w} into lists of length {n}
    return [{p}[{i}:{i} + {n}] for {i} in range(0, len({p}), {n})]
> return only the first such list
    return {p}[:{n}]
# strings | longer_than,long | returns the {w} with more than {n} characters
    return [{i} for {i} in {p} if len({i}) > {n}]
> return those with fewer characters instead
    return [{i} for {i} in {p} if len({i}) < {n}]
# strings | upper,shout | returns the {w} in upper case
    return [{i}.upper() for {i} in {p}]
> use lower case instead
    return [{i}.lower() for {i} in {p}]
# strings | lengths_of,sizes_of | returns a dictionary from each of the {w} to its length
    result = {{}}
    for {i} in {p}:
        result[{i}] = len({i})
    return result
> write it as a dict comprehension
    return {{{i}: len({i}) for {i} in {p}}}
# strings | starting_with,begin_with | returns the {w} that start with the letter '{l}'
    return [{i} for {i} in {p} if {i}.startswith('{l}')]
> return those that end with it
    return [{i} for {i} in {p} if {i}.endswith('{l}')]
# strings | containing,with_letter | counts the {w} that contain the letter '{l}'
    count = 0
    for {i} in {p}:
        if '{l}' in {i}:
            count += 1
    return count
> return them as a list
    return [{i} for {i} in {p} if '{l}' in {i}]
# strings | join,combine | joins the {w} with the separator '{s}'
    return '{s}'.join({p})
> sort them before joining
    return '{s}'.join(sorted({p}))
# strings | longest,find_longest | returns the longest of the {w}
    best = ''
    for {i} in {p}:
        if len({i}) > len(best):
            best = {i}
    return best
> return its length instead
    return max(len({i}) for {i} in {p})
# strings | count_each,frequency | counts how often each of the {w} occurs
    counts = {{}}
    for {i} in {p}:
        counts[{i}] = counts.get({i}, 0) + 1
    return counts
> return the most frequent one
    return max({p}, key={p}.count)
# strings | shorten,cut | cuts each of the {w} to {n} characters
    return [{i}[:{n}] for {i} in {p}]
> keep the last {n} characters instead
    return [{i}[-{n}:] for {i} in {p}]
# strings | by_length,sort_length | sorts the {w} by length
    return sorted({p}, key=len)
> put the longest first
    return sorted({p}, key=len, reverse=True)
# strings | palindromes,mirror | returns the {w} that read the same backwards
    return [{i} for {i} in {p} if {i} == {i}[::-1]]
> return all of them reversed
    return [{i}[::-1] for {i} in {p}]
# strings | numbered,number | puts a number in front of each of the {w}, starting with {n}
    result = []
    for place, {i} in enumerate({p}, start={n}):
        result.append(f'{{place}}. {{{i}}}')
    return result
> return one string with a line for each
    lines = [f'{{place}}. {{{i}}}' for place, {i} in enumerate({p}, start={n})]
    return '\\n'.join(lines)
"""
