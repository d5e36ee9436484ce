"""Program of the sandboxed processes that graders start. It is run as a file and imports only the standard library.

    confined.py code    one JSON line {"program", "tests", "word", "seconds"}: runs the tests, answers with one line
    confined.py math    JSON lines {"right", "answer"}: whether math-verify finds the two equal, one line for each

Both give up most permissions (`confine`) before they read anything that a model wrote: a system call filter (seccomp)
allows them only to compute, read files, and write to open descriptors. Network, other processes or threads, new or
changed files, signals and waiting are refused with EPERM. CPU time and memory are limited too. The parent limits wall
time, because the untrusted program could change a limit in its own process.

A test runs in the process of the tested program, as in every grader of this kind, so a program that knows this file
could find the word that marks a valid result and cheat. It cannot harm the machine.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys

MEMORY = 1 << 30  # bytes of address space of a tested program
_MATH_MEMORY = 4 << 30  # for sympy
_ALLOWED = (  # numbers of x86-64
    *(0, 1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21),  # read … access: files that are open, memory
    *(24, 25, 28, 32, 39, 60, 63, 79, 89, 96, 97, 98, 99, 100),  # sched_yield … times: about this process and machine
    *(102, 104, 107, 108, 131, 158, 186, 202, 217, 228, 229, 231),  # getuid … exit_group
    *(262, 267, 269, 273, 318, 332, 334, 439),  # newfstatat … faccessat2
)
# By the value of one argument: ioctl(TCGETS, FIOCLEX, TIOCGWINSZ), fcntl(F_DUPFD, GETFD, SETFD, GETFL, DUPFD_CLOEXEC),
# prlimit64 of this process.
_ALLOWED_WITH = ((16, 1, (0x5401, 0x5451, 0x5413)), (72, 1, (0, 1, 2, 3, 1030)), (302, 0, (0,)))
_OPENS = ((2, 1), (257, 2))  # open, openat, and where their flags stand
_TO_WRITE = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | 0o20000000  # O_WRONLY, RDWR, CREAT, TRUNC, APPEND, TMPFILE's own bit
_ARCH_X86_64 = 0xC000003E
_EPERM, _ALLOW, _KILL = 0x00050001, 0x7FFF0000, 0x80000000  # SECCOMP_RET_*
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF_LD+W+ABS, BPF_JMP+JEQ, +JSET, BPF_RET
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER, _END_WITH_PARENT = 38, 22, 2, 1


def can_confine() -> str:
    """Return why this machine does not support the sandbox, or ""."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the sandbox needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    return ""


def confine(memory: int, seconds: int | None = None) -> None:
    """Sandbox this process and its children from here on. Raises OSError if that fails.

    memory: bytes of address space.
    seconds: of CPU time; None: limited by the parent.
    """
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(what, (most, most))
    if seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    libc = ctypes.CDLL(None, use_errno=True)
    program = _filter()
    code = ctypes.create_string_buffer(program, len(program))
    packed = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    filter_ = ctypes.create_string_buffer(packed, len(packed))
    for call in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.addressof(filter_), 0, 0)):
        if libc.prctl(*map(ctypes.c_ulong, call)):
            number = ctypes.get_errno()
            raise OSError(number, f"the kernel refused the system call filter: {os.strerror(number)}")


def _filter() -> bytes:
    """Return the seccomp program: system calls that are not allowed return EPERM."""
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCH_X86_64), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for number in _ALLOWED:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, argument, values in _ALLOWED_WITH:
        tests = [line for value in values for line in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]
        lines += [
            (_EQUAL, 0, len(tests) + 2, number),
            (_LOAD, 0, 0, 16 + 8 * argument),
            *tests,
            (_RETURN, 0, 0, _EPERM),
        ]
    for number, argument in _OPENS:
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * argument), (_ANY_BIT, 1, 0, _TO_WRITE)]
        lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    lines.append((_RETURN, 0, 0, _EPERM))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _answer_and_keep_quiet() -> int:
    """Return the descriptor for the result; printed output is discarded."""
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return answer


def run_tests() -> None:
    """Run the tests of one program; each is Python code that raises on failure."""
    asked = json.loads(sys.stdin.readline())
    out = _answer_and_keep_quiet()
    try:
        confine(MEMORY, asked["seconds"])
    except (OSError, ValueError) as error:
        os.write(out, json.dumps({"refused": _said(error)}).encode())
        return
    passed, why, word = 0, "", asked["word"]
    tests = asked["tests"]
    world = {"__name__": "answer"}
    try:
        exec(compile(asked["program"], "answer", "exec"), world)
    except BaseException as error:  # sys.exit too
        why = f"the program raised {_said(error)}"
    else:
        for test in tests:
            try:
                exec(compile(test, "test", "exec"), world)
                passed += 1
            except BaseException as error:
                why = why or f"{' '.join(test.split())[:100]} raised {_said(error)}"
    os.write(out, json.dumps({"word": word, "passed": passed, "why": why}).encode())
    os._exit(0)  # exit without running the program's exit handlers


def compare_formulas() -> None:
    """Compare answers with reference answers."""
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, 9)
    from math_verify import parse, verify

    out = _answer_and_keep_quiet()

    def read(text: str) -> list:
        found = parse(text, parsing_timeout=0, raise_on_error=True)  # 0: no limit; the parent limits the time
        return found if any(not isinstance(one, str) for one in found) else []

    def bare(text: str) -> list:
        """Parse a text that is only a formula or a number."""
        return read(text) if "$" in text or "\\boxed" in text else read(f"\\boxed{{{text}}}") or read(text)

    read("$\\frac{1}{2}$ is 0.5")  # load the lazily imported parts of sympy and the parser
    if not can_confine():
        confine(_MATH_MEMORY)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            right = bare(asked["right"])
            said = [] if asked["answer"] is None else (bare if asked["bare"] else read)(asked["answer"])
            same = bool(right and said) and verify(right, said, timeout_seconds=None, raise_on_error=True)
            found = {"right": str(right[0]) if right else None, "said": str(said[0]) if said else None, "same": same}
        except BaseException as error:
            found = {"raised": _said(error)}
        os.write(out, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    {"code": run_tests, "math": compare_formulas}[sys.argv[1]]()
