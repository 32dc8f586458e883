"""Which traps lie outside of what capture promises: those whose state two runs detect, and those that are not promised at all.
The contract itself is in docs/capture.md; every other trap is promised.
"""

from __future__ import annotations

# State that is neither the model's nor torch's, and is another one in the second run: kept whole, or refused.
DETECTED = frozenset(
    {
        "a counter on the class", "a counter in a global", "a Random shared by all calls", "a nonlocal counter",
        "a list closed over", "a dict closed over", "a list closed over by an inner function",
        "a dict closed over by a method of a local class", "an iterator closed over", "a generator closed over",
        "tensors in a list closed over", "a nonlocal tensor", "a list as a default", "a dict as a keyword default",
        "a list as a default further inside", "a counter on the function itself", "a callable object that counts",
        "a method of an object that counts", "a partial of a callable object", "a list on the class",
        "a counter on another class", "a table on another class, reached by a helper", "a counter in a global object",
        "a counter in another Python module", "a global deque that forgets", "a count in the environment",
        "a count among the options of the command line", "a global queue", "a global iterator", "a global cycle",
        "a global dict of Python's own", "a count of the thread", "a context variable that counts",
        "a count in a module imported on the way",
    }
)  # fmt: skip
# Errors that the model would catch, and a `train()` of its own: the program raises where eager goes on, or is in another mode.
OUTSIDE = frozenset(
    {
        "try and recover", "an error suppressed", "an error caught further out", "a wrong kind caught",
        "a layer's error caught", "a module's error caught", "an error of an operator survived",
        "an error of values survived", "a mode of its own making", "a method of an object that writes a tensor",
    }
)  # fmt: skip
