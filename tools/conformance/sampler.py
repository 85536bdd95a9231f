"""A sample of a grid of parameters."""

import itertools
import random


def pairwise(**parameters):
    """Returns choices of all parameters, in which each two values of two parameters occur together at least once."""
    rng = random.Random(0)
    names = list(parameters)
    pairs = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in parameters[a] for y in parameters[b]
    }
    chosen = []
    while pairs:
        # The first pair that is left is in the choice, and the best of some random ones has it.
        first = min(pairs, key=str)
        tries = [{name: rng.choice(parameters[name]) for name in names} | dict(first) for _ in range(50)]
        best = max(tries, key=lambda choice: len(pairs & covered(choice)))
        pairs -= covered(best)
        chosen.append(best)
    return chosen


def covered(choice):
    return set(itertools.combinations(choice.items(), 2))
