"""Runs inside the sandbox, in the process of the program under test: loads the program and answers for it.

`program_tests.py` starts it and keeps the tests and what they expect to itself. Requests and answers are lines of
JSON. What leaves this process is plain data, whatever the program made of its own types and operators; what is not
plain data stays here and is known outside by a number.
"""

import builtins
import json
import os
import sys
from itertools import islice
from types import ModuleType
from typing import Any

from slipstream.rewards.plain_data import decode, encode

LONGEST_ITERATION = 1_000_000

USUAL_NAMES = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *
from math import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
"""
"""What a program for LeetCode has without importing it, as in the harnesses of LiveCodeBench and APPS."""


class Host:
    """The program's namespace, and the objects that have been given a number."""

    def __init__(self) -> None:
        module = ModuleType("solution")  # not __main__: what a program does only as a script is not tested
        sys.modules["solution"] = module  # where dataclasses look their module up
        self.names = module.__dict__
        self.objects: list[Any] = []

    def answer(self, request: dict[str, Any]) -> object:
        """Do what is asked. Whatever it raises is the program's."""
        arguments = decode(request["arguments"], self.objects.__getitem__)
        named = decode(request["named"], self.objects.__getitem__)
        match request["do"]:
            case "load":
                if arguments[1]:
                    self._provide_usual_names()
                exec(compile(arguments[0], "program.py", "exec"), self.names)
                return None
            case "find":
                return self._find(arguments[0])
            case "call":
                return arguments[0](*arguments[1:], **named)
            case "attribute":
                return getattr(arguments[0], arguments[1])
            case "set attribute":
                setattr(arguments[0], arguments[1], arguments[2])
                return None
            case "list":
                return list(islice(arguments[0], LONGEST_ITERATION))
            case "next":
                return list(islice(iter(arguments[0]), 1))
            case "item":
                return arguments[0][arguments[1]]
            case "length":
                return len(arguments[0])
            case "text":
                return str(arguments[0])
        raise ValueError(request["do"])

    def _provide_usual_names(self) -> None:
        """Put them where built-in names are: a program that does not define a name is not taken to have done so."""
        usual: dict[str, Any] = {}
        exec(USUAL_NAMES, usual)
        self.names["__builtins__"] = usual | vars(builtins)

    def _find(self, name: str) -> Any:
        """A name of the program, or a method of its class Solution, as LeetCode has them."""
        if name in self.names:
            return self.names[name]
        solution = self.names.get("Solution")
        if solution is not None and hasattr(solution, name):
            return getattr(solution(), name)
        raise NameError(f"name {name!r} is not defined by the program")

    def number_of(self, value: object) -> int:
        """Keep an object and return its number."""
        self.objects.append(value)
        return len(self.objects) - 1


def main() -> None:
    """Answer until the other side closes. The last two arguments are the descriptors of requests and answers."""
    requests, answers = (int(argument) for argument in sys.argv[-2:])
    sys.argv = ["program.py"]
    host = Host()
    with open(requests, encoding="ascii") as lines:
        for line in lines:
            try:
                answer = {"value": encode(host.answer(json.loads(line)), host.number_of)}
            except BaseException as error:  # the program may raise anything, SystemExit too
                answer = {"raised": type(error).__name__, "message": str(error)[:500]}
            text = json.dumps(answer).encode("ascii") + b"\n"
            while text:
                text = text[os.write(answers, text) :]
