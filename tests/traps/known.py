"""Traps that go wrong today, with the reason: each is a strict expected failure, to be taken out when it is mended.
What a trap does wrong in detail is shown by `python -m tests.traps NAME`.
"""

from __future__ import annotations

import torch

# By reason: the traps, and the ways of capturing (s: symbolic, m: module, f: function) in which they go wrong.
_WRONG: dict[str, dict[str, str]] = {
    "what a run writes is put back only where torch counts the write, and only in buffers": {
        "batch norm": "mf",
        "functional batch norm": "mf",
        "a module used twice": "mf",
        "a parameter written": "mf",
        "a plain tensor added to": "mf",
        "a global tensor added to": "mf",
        "a lazy layer": "mf",
    },
    "the states of Python's and numpy's random numbers and of generators are not put back, and unseen draws not noticed": {
        "Python's random numbers": "mf",
        "branch on Python's random numbers": "mf",
        "Python's random numbers imported by name": "mf",
        "Python's random choices": "smf",
        "a Random shared by all calls": "smf",
        "numpy's random numbers": "smf",
        "a generator made inside": "mf",
        "a generator on self": "mf",
    },
    "how many tensors a call returned is fixed without a guard": {
        "iterate over a tensor": "mf",
        "unbind and stack": "mf",
        "split in pieces": "mf",
        "chunks of a batch": "mf",
        "pieces of a tensor counted": "mf",
        "unpack with a star": "mf",
        "zip of two tensors": "mf",
    },
    "a tensor made where the run is not watched becomes a constant": {
        "a scripted function": "mf",
        "a pool of threads": "mf",
        "layers in threads": "smf",
        "an ensemble by vmap and functional_call": "mf",
        "a hook set during the run": "mf",
        "a subclass of Tensor made inside": "mf",
        "through the storage": "mf",
        "copies by Python": "smf",
        "saved and loaded": "mf",
    },
    "numbers and objects that go into or come out of a leaf call are fixed without a guard": {
        "a hooked module that returns numbers": "mf",
        "a hooked module that returns an object": "mf",
        "a hooked module that takes an object": "mf",
        "a hooked module that fills a list": "mf",
        "checkpoint of a closure": "mf",
    },
    "the node that reads a number is made when the number is used, not when it is read": {
        "a size read before a transposition in place": "mf",
        "item, then a write": "mf",
        "item twice around a write": "mf",
    },
    "torch's functions of symbolic numbers give plain ones, without a guard": {
        "a float times a size": "mf",
        "symbolic functions of torch": "mf",
        "an autograd function with other arguments": "mf",
        "ceil, floor and round of sizes": "mf",
    },
    "a symbolic number is no int, and its text is no number": {
        "isinstance of a size": "mf",
        "the type of a size": "mf",
        "a size asked for its index": "mf",
        "a size in a text": "smf",
        "a shape in a text": "mf",
        "a size as a key": "s",
        "tensor in a text": "smf",
    },
    "a hook on a tensor, or on what it saves, is dropped": {
        "a hook on an activation": "smf",
        "saved tensors changed": "smf",
    },
    "a leaf module is called with its own parameters, whatever stands in for them": {
        "functional_call with other weights": "m",
    },
    "switches of torch are read and set unseen": {
        "grad mode asked": "smf",
        "set_grad_enabled as a call": "smf",
        "default dtype switched": "smf",
    },
    "the kind of an input (tensor, None, number, bool) is not checked": {
        "an optional input": "mf",
        "one, true and one point zero": "mf",
        "tensor or number": "mf",
    },
    "a structure other than the captured one raises no GuardError, or is taken for it": {
        "any number of tensors": "mf",
        "keywords handed through": "mf",
        "a list of tensors": "mf",
        "a dict of tensors": "mf",
    },
    "defaults that were left out are not parameters of the program": {
        "a default left out": "mf",
        "positions and keywords": "mf",
    },
    "inputs that are objects are not taken apart": {
        "a dataclass in": "mf",
        "an object in": "mf",
    },
    "one tensor given twice counts as one input": {
        "one tensor given twice": "mf",
        "same tensor": "mf",
    },
    "containers given as inputs are written without notice": {
        "a list of tensors written": "mf",
        "an input list appended to": "mf",
        "an input dict filled": "mf",
    },
    "device, grad_fn and is_leaf decide without a guard": {
        "branch on the device": "mf",
        "branch on grad_fn and is_leaf": "mf",
        "tensors on the model's device": "s",
    },
    "an error that the model recovers from decides without a guard": {
        "try and recover": "smf",
    },
    "the stand-in for self.training is no bool": {
        "the mode in a text": "smf",
        "the mode's type": "smf",
        "the mode handed to a built-in function": "smf",
        "LSTM and GRU": "f",
        "a packed sequence": "mf",
        "modules in a plain list": "mf",
    },
    "constants are cast with the program": {
        "a plain tensor as an attribute": "smf",
        "a global tensor": "smf",
    },
    "a method that returns its tensor unchanged gives a view, which has no gradient": {
        "backward inside": "mf",
    },
    "state outside of the attributes that are watched changes unseen": {
        "an iterator on self": "smf",
        "an array on self": "smf",
        "a counter on the class": "smf",
        "a counter in a global": "smf",
    },
    "hooks for all modules are not recorded": {
        "a hook for every module": "sm",
    },
    "the model catches the error that refuses it": {
        "recover from a conversion": "s",
        "recover from anything": "s",
    },
    "a proxy answers isinstance, hasattr and `is` for itself, not for its value": {
        "isinstance of a size": "s",
        "the type of a size": "s",
        "a size asked for its index": "s",
        "one, true and one point zero": "s",
        "tensor or number": "s",
        "a list of tensors": "s",
        "a dataclass in": "s",
        "asking for an attribute": "s",
        "nested containers in": "s",
        "containers out": "s",
        "a module that is called in its own way": "s",
    },
    "what torch or Python says about a proxy is no TraceError": {
        "a scripted function": "s",
        "an ensemble by vmap and functional_call": "s",
        "a hook set during the run": "s",
        "saved and loaded": "s",
        "asynchronous by fork": "s",
        "a hooked module that fills a list": "s",
        "ceil, floor and round of sizes": "s",
        "a size as a str": "s",
        "divmod of a size": "s",
        "shapes broadcast": "s",
        "mathematics on an item": "s",
        "item in a text": "s",
        "functional_call with other weights": "s",
        "a word": "s",
        "numpy and back": "s",
        "numpy called on a tensor": "s",
        "the rotary table kept in single precision": "s",
        "set_grad_enabled by a condition": "s",
        "vmap over a module": "s",
        "grad inside": "s",
        "jacobian inside": "s",
        "decorated forward with keywords": "s",
    },
}
_WAYS = {"s": "symbolic", "m": "module", "f": "function"}

KNOWN: dict[tuple[str, str], str] = {
    (name, _WAYS[letter]): reason
    for reason, traps in _WRONG.items()
    for name, letters in traps.items()
    for letter in letters
}

# What is reached today; to be raised. The aim for the two watched ways is 0.9.
LEAST_SHARE_OF_RIGHT = {"symbolic": 0.573, "module": 0.708, "function": 0.709}

if not hasattr(torch.autograd.Function.__dict__["apply"], "__func__"):  # written in C from torch 2.15 on
    KNOWN |= {
        ("an autograd function under another name", way): "apply cannot be seen by an alias" for way in _WAYS.values()
    }
    LEAST_SHARE_OF_RIGHT["symbolic"] = 0.57
