"""Runs inside the sandbox: starts the program under test in a process of its own and holds it against the tests.

`code.py` writes the job to standard input as JSON and reads from descriptor 3 one line of JSON a test. The tests, what
they expect, and that descriptor never enter the program's process: it gets input or arguments and gives output or
values, so there is nothing in it that could be patched, skipped or imitated to pass. Test code of the label runs here,
on stand-ins for the functions of the program.
"""

import builtins
import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from slipstream.rewards.comparison import same_output, same_result
from slipstream.rewards.label_code import COUNT, PROGRAM_MODULE, LabelError, names_under_test, read_pieces, run_tests
from slipstream.rewards.plain_data import decode, encode, import_types

REPORT_DESCRIPTOR = 3
SET_DUMPABLE = 4  # of prctl(2)
FLAGS = ("-s", "-P", "-B", "-X", "utf8")
START_HOST = "import sys; sys.path.insert(0, sys.argv[1]); from slipstream.rewards.program_host import main; main()"
LONGEST_REASON = 200

# Exceptions that would end a loop of the test code, or more, if the program could raise them there.
NOT_PASSED_ON = (StopIteration, StopAsyncIteration)


class ProgramError(Exception):
    """The program did not do what a test needs: it ended, was too slow, or answered nonsense."""


def main() -> None:
    """Run all tests of the job, or those up to the first failure."""
    # The program has this process's user, and must not read its memory or its files.
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    job = json.loads(sys.stdin.buffer.read())
    sys.stdin.close()
    # Without namespaces the program may be able to put files into the folder of these modules.
    import_types()
    job["modules"] = sys.path.pop(0)
    deadline = time.monotonic() + job["total_timeout_s"]
    run = {"stdin": stdin_tests, "call": call_tests, "code": code_tests}[job["kind"]]
    report({"started": True})
    try:
        for reason in run(job, deadline):
            report({"passed": reason is None, "reason": None if reason is None else reason[:LONGEST_REASON]})
            if reason is not None and job["stop_at_failure"]:
                return
    except LabelError as error:
        report({"label": str(error)[:LONGEST_REASON]})
    except Exception as error:  # a program may have taken the means to go on: that is its own loss
        report({"passed": False, "reason": f"{type(error).__name__}: {error}"[:LONGEST_REASON]})


def report(message: dict[str, Any]) -> None:
    """Write one line for `code.py`."""
    os.write(REPORT_DESCRIPTOR, json.dumps(message).encode("ascii") + b"\n")


def time_left(job: dict[str, Any], deadline: float) -> float:
    """Seconds that the next test may take; ProgramError where the time of all tests is spent."""
    left: float = min(job["timeout_s"], deadline - time.monotonic())
    if left <= 0:
        raise ProgramError("there was no time left for it")
    return left


# ---------------------------------------------------------------------- input and output


def stdin_tests(job: dict[str, Any], deadline: float) -> Iterator[str | None]:
    """One new process a test: None where its standard output is the expected one, else why it is not."""
    with open("program.py", "w", encoding="utf-8", errors="replace") as file:
        file.write(job["program"])
    for given, expected in job["tests"]:
        try:
            output = run_once(given, time_left(job, deadline), job["output_bytes"])
            yield None if same_output(output, expected) else f"expected {expected!r}, found {output!r}"
        except (ProgramError, OSError) as error:  # OSError: no process can be started beside those it has left
            yield str(error)


def run_once(given: str, timeout_s: float, output_bytes: int) -> str:
    """Run the program on an input and return its output. ProgramError unless it ends well and in time."""
    with subprocess.Popen(
        [sys.executable, *FLAGS, "program.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            output, errors = communicate(process, given.encode(errors="replace"), timeout_s, output_bytes)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise ProgramError(f"ended with exit code {process.returncode}: {last_line(errors)}")
    return output.decode(errors="replace")


def communicate(
    process: "subprocess.Popen[bytes]", given: bytes, timeout_s: float, output_bytes: int
) -> tuple[bytes, bytes]:
    """Feed a process and read from it until its output ends and it has ended, within limits on time and size."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    deadline = time.monotonic() + timeout_s
    stdin = process.stdin.fileno()
    received = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for reader in received:
            selector.register(reader, selectors.EVENT_READ)
        os.set_blocking(stdin, False)
        selector.register(stdin, selectors.EVENT_WRITE)
        while len(selector.get_map()) > 0:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ProgramError(f"took longer than {timeout_s:.3g} s")
            for key, _ in ready:
                if key.fd == stdin:
                    given = given[write_some(stdin, given) :]
                    if not given:
                        selector.unregister(stdin)
                        process.stdin.close()
                else:
                    piece = os.read(key.fd, 1 << 16)
                    received[key.fd] += piece
                    if not piece:
                        selector.unregister(key.fd)
                    if len(received[key.fd]) > output_bytes:
                        raise ProgramError(f"wrote more than {output_bytes} bytes")
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"took longer than {timeout_s:.3g} s") from error
    return bytes(received[process.stdout.fileno()]), bytes(received[process.stderr.fileno()])


def write_some(descriptor: int, data: bytes) -> int:
    """How many bytes the pipe took; all of them where nobody reads any more."""
    try:
        return os.write(descriptor, data[: 1 << 16])
    except BrokenPipeError:
        return len(data)


def last_line(errors: bytes) -> str:
    """What a traceback ends with."""
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing on standard error"


# ---------------------------------------------------------------------- the program in a process of its own


class Program:
    """The program under test behind two pipes. Started when it is needed, and again after it was killed."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = -1
        self.deadline = 0.0
        self.was_asked = False

    def ask(self, do: str, *arguments: object, **named: object) -> Any:
        """Have the program's process do something; returns plain data or a stand-in.

        Raises ProgramError, or what the program raised where that is an ordinary built-in exception.
        """
        self.was_asked = self.was_asked or do != "load"
        if self._process is None:
            self._start()
            if do != "load":
                self.ask("load", self._job["program"], self._job["usual_names"])
        request = {"do": do, "arguments": encode([*arguments], number_of), "named": encode(named, number_of)}
        answer = self._exchange(json.dumps(request).encode("ascii") + b"\n")
        if "raised" in answer:
            raise raised(str(answer["raised"]), str(answer.get("message")))
        try:
            return decode(answer["value"], lambda number: Standin(self, number))
        except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise ProgramError(f"an answer that is none: {error!r}") from error

    def kill(self) -> None:
        """End the process, with what it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)
        self._process = None

    def _start(self) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, *FLAGS, "-c", START_HOST, self._job["modules"], str(requests), str(answers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[requests, answers],
            start_new_session=True,
        )
        os.close(requests)
        os.close(answers)
        os.set_blocking(self._requests, False)

    def _exchange(self, request: bytes) -> dict[str, Any]:
        """Send a line and return the line that answers it, as a dict."""
        try:
            line = self._send_and_receive(request)
        except BaseException:
            self.kill()  # or its answer would be taken for that to the next request
            raise
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProgramError("an answer that is none") from error
        if not isinstance(answer, dict):
            raise ProgramError("an answer that is none")
        return answer

    def _send_and_receive(self, request: bytes) -> bytes:
        received = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            selector.register(self._requests, selectors.EVENT_WRITE)
            while not received.endswith(b"\n"):
                ready = selector.select(max(0.0, self.deadline - time.monotonic()))
                if not ready:
                    raise ProgramError("took too long")
                for key, _ in ready:
                    if key.fd == self._requests:
                        request = request[write_some(key.fd, request) :]
                        if not request:
                            selector.unregister(key.fd)
                        continue
                    piece = os.read(key.fd, 1 << 16)
                    received += piece
                    if not piece or len(received) > self._job["output_bytes"]:
                        raise ProgramError("ended" if not piece else "answered too much")
        return bytes(received)


class Standin:
    """What a test sees of an object that is not plain data: it can be called, read and handed back.

    It equals nothing but itself and has no order: what decides a test is never asked of the program.
    """

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self._program.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("attribute", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._program.ask("set attribute", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(expect(list, self._program.ask("list", self)))

    def __next__(self) -> Any:
        for value in expect(list, self._program.ask("next", self)):
            return value
        raise StopIteration

    def __getitem__(self, key: object) -> Any:
        return self._program.ask("item", self, key)

    def __len__(self) -> int:
        return int(expect(int, self._program.ask("length", self)))

    def __str__(self) -> str:
        return str(expect(str, self._program.ask("text", self)))

    __repr__ = __str__


def expect(kind: type, value: Any) -> Any:
    """The value if it is of a type; ProgramError otherwise."""
    if type(value) is not kind:
        raise ProgramError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def number_of(value: object) -> int:
    """The number of the object that a stand-in stands for. LabelError for what the program cannot be given."""
    if not isinstance(value, Standin):
        raise LabelError(f"a test passes a {type(value).__name__} to the program, which only plain data can be")
    number: int = object.__getattribute__(value, "_number")
    return number


def raised(name: str, message: str) -> Exception:
    """The exception to raise for one that the program raised."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NOT_PASSED_ON):
        try:
            return kind(message)
        except TypeError:  # one that takes more than a message
            pass
    return ProgramError(f"{name}: {message}")


# ---------------------------------------------------------------------- calls


def call_tests(job: dict[str, Any], deadline: float) -> Iterator[str | None]:
    """One call a test: None where it returns what is expected, else why it does not."""
    program = Program(job)
    for arguments, expected in job["tests"]:
        try:
            program.deadline = time.monotonic() + time_left(job, deadline)
            found = program.ask("call", program.ask("find", job["function"]), *arguments)
            yield None if same_result(found, expected) else f"expected {expected!r}, found {found!r}"
        except Exception as error:
            yield f"{type(error).__name__}: {error}"
    program.kill()


# ---------------------------------------------------------------------- test code


class TestNames(dict[str, Any]):
    """The namespace of test code: its own names, the functions under test, Python's names, then the program's.

    So built-in functions and modules of the standard library are the real ones, whatever the program calls its own.
    `checks` is how many checks the test code has made.
    """

    def __init__(self, program: Program, under_test: set[str]) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self[COUNT] = self._count
        self.checks = 0
        self._program = program
        self._under_test = under_test

    def __missing__(self, name: str) -> Any:
        if name not in self._under_test:
            if hasattr(builtins, name):
                raise KeyError(name)
            if name in sys.stdlib_module_names:
                return importlib.import_module(name)
        return self._program.ask("find", name)

    def _count(self, outcome: Any) -> Any:
        self.checks += 1
        return outcome


class ProgramModule(ModuleType):
    """What test code imports the program's names from."""

    def __init__(self, program: Program) -> None:
        super().__init__(PROGRAM_MODULE)
        self._program = program

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("find", name)


def code_tests(job: dict[str, Any], deadline: float) -> Iterator[str | None]:
    """One piece of test code a test, in one namespace: None where it makes checks and raises nothing, else why not."""
    (setup, *pieces), found = read_pieces([job["setup"], *job["tests"]], check=job["check"])
    program = Program(job)
    names = TestNames(program, {job["function"]} if job["function"] else names_under_test(found))
    sys.modules[PROGRAM_MODULE] = ProgramModule(program)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what test code prints is for nobody
    signal.signal(signal.SIGALRM, interrupt)
    is_set_up = False
    for piece in pieces:
        names.checks = 0
        try:
            allowed = time_left(job, deadline)
            program.deadline = time.monotonic() + allowed
            signal.setitimer(signal.ITIMER_REAL, allowed + 0.5)  # the test code may loop itself
            if not is_set_up:
                exec(setup.code, names)
                is_set_up = True
            exec(piece.code, names)
            run_tests(names, piece.tests)
            if job["check"]:
                if "check" not in names:
                    raise LabelError("the test program defines no function check")
                names["check"](program.ask("find", job["function"]))
            if not program.was_asked:
                raise LabelError("the tests use nothing of the program")
            outcome = None if names.checks > 0 else "no check was reached"
        except LabelError:
            raise
        except BaseException as error:  # test code may raise anything
            outcome = f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        yield outcome
    program.kill()


def interrupt(_number: int, _frame: object) -> None:
    raise ProgramError("took too long")
