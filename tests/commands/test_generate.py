"""`surefoot generate` and `surefoot chat`, called as a user calls them."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.faults import gives, lines_giving, prints_fault
from helpers.tiny_models import tiny_llama
from surefoot.commands import generate as chat_module
from surefoot.commands.main import main
from surefoot.system.hub import Repository
from surefoot.system.messages import clean


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Larger weights than usual, so that answers vary and first choices are clear."""
    folder = tiny_llama(tmp_path_factory.mktemp("cli") / "base", hidden=64)
    large = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in large.parameters():
        if parameter.ndim == 2:
            parameter.data *= 10
    large.save_pretrained(folder)
    return folder


def call(*arguments: object, stdin: str = "") -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def reference(folder: Path, *turns: str, new_tokens: int = 12) -> str:
    """transformers' own greedy answer to a conversation: user, assistant, user …"""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    roles = ("user", "assistant")
    chat = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    stops = [321, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    out = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, eos_token_id=stops, pad_token_id=321)
    return tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)


def test_one_prompt_prints_its_answer_and_nothing_else(model):
    result = call("generate", model, "--prompt", "What is a heron?", "--max-new-tokens", 12)
    assert result.exit_code == 0
    assert result.stdout == clean(reference(model, "What is a heron?")) + "\n"
    assert result.stderr.count("\n") == 1
    assert str(model) in result.stderr


def test_prompts_come_from_options_a_file_or_a_pipe(model, tmp_path):
    texts = ["What is a heron?", "Give three tips."]
    (tmp_path / "prompts.txt").write_text("\n".join([texts[0], "", texts[1], ""]))
    by_option = call("generate", model, "--prompt", texts[0], "--prompt", texts[1], "--max-new-tokens", 12)
    by_file = call("generate", model, "--file", tmp_path / "prompts.txt", "--max-new-tokens", 12)
    by_pipe = call("generate", model, "--max-new-tokens", 12, stdin="\n".join(texts))
    assert by_option.stdout == by_file.stdout == by_pipe.stdout
    assert by_option.stdout == "".join(f"> {text}\n{clean(reference(model, text))}\n\n" for text in texts)


def test_prompts_that_are_not_utf8_are_one_line(model, tmp_path):
    (tmp_path / "prompts.txt").write_bytes("caf\xe9".encode("latin-1"))
    result = call("generate", model, "--file", tmp_path / "prompts.txt")
    assert result.exit_code == 2
    assert lines_giving(result.stderr, tmp_path / "prompts.txt", 3)


def test_json_holds_one_object_per_answer(model):
    result = call("generate", model, "--prompt", "Hi", "--max-new-tokens", 5, "--json")
    record = json.loads(result.stdout)
    assert record.keys() == {"prompt", "answer", "stopped", "tokens"}
    assert (record["prompt"], record["answer"]) == ("Hi", reference(model, "Hi", new_tokens=5))
    assert record["tokens"] <= 5


def test_raw_text_is_continued_without_a_template(model):
    result = call("generate", model, "--raw", "--prompt", "A heron is", "--max-new-tokens", 8)
    tokenizer, own = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    prompt = torch.tensor([tokenizer("A heron is")["input_ids"]])
    expected = own.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=321)[0, prompt.shape[1] :]
    assert result.stdout == clean(tokenizer.decode(expected, skip_special_tokens=True)) + "\n"
    assert "template" not in result.stderr


def test_samples_repeat_with_their_seed(model):
    arguments = ("generate", model, "--prompt", "Hi", "--max-new-tokens", 12, "--temperature", 1, "--top-p", 0.9)
    first, again, other = call(*arguments), call(*arguments), call(*arguments, "--seed", 1)
    assert first.stdout == again.stdout != other.stdout


def test_a_system_text_reaches_the_model(model):
    arguments = ("generate", model, "--prompt", "Hi", "--max-new-tokens", 12)
    assert call(*arguments).stdout != call(*arguments, "--system", "Speak of fish.").stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prompt", "a", "--raw", "--system", "b"), "--raw"),
        (("--prompt", "a", "--max-new-tokens", "512"), 512),
        (("--prompt", "a", "--temperature", "-1"), "temperature"),
        (("--prompt", "a", "--temperature", "nan"), "temperature"),
        (("--prompt", "a", "--temperature", "inf"), "temperature"),
        (("--prompt", "a", "--top-p", "nan"), "top-p"),
        ((), "--prompt"),
    ],
    ids=str,
)
def test_a_wrong_call_is_one_line_and_exit_2(model, arguments, named):
    result = call("generate", model, *arguments)
    assert result.exit_code == 2
    assert gives(result.stderr.splitlines()[-1], named)
    assert result.stdout == ""


def test_a_model_cannot_send_codes_to_the_terminal(model, monkeypatch):
    from surefoot.models import generate

    nasty = "a\x1b[31mb\x1b]0;title\x07c\rd"
    monkeypatch.setattr(generate, "_text", lambda tokenizer, ids: nasty[: len(ids)])
    for result in (
        call("generate", model, "--prompt", "a", "--max-new-tokens", len(nasty)),
        call("chat", model, "--max-new-tokens", len(nasty), stdin="a\n"),
    ):
        assert result.stdout.startswith("a")
        assert not {"\x1b", "\r", "\x07"} & set(result.stdout)


def test_chat_remembers_the_conversation_until_reset(model):
    lines = ["What is a heron?", "", "And a trout?", "/help", "/reset", "And a trout?", "/exit", "never read"]
    result = call("chat", model, "--max-new-tokens", 12, stdin="\n".join(lines))
    assert result.exit_code == 0
    first = reference(model, lines[0])
    second = reference(model, lines[0], first, lines[2])
    anew = reference(model, lines[5])
    assert second != anew  # else the test could not tell
    assert result.stdout == clean(f"{first}\n{second}\n{anew}\n")
    assert all(f"\n{command}" in result.stderr for command in ("/reset", "/exit", "/help", "Ctrl-C"))
    assert "\r" not in result.output
    assert "\x1b" not in result.output


def test_an_unknown_command_is_not_said_to_the_model(model):
    result = call("chat", model, "--max-new-tokens", 3, stdin="/foo\n/exit\n")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert any(gives(line, "/foo") and gives(line, "/help") for line in result.stderr.splitlines())


@pytest.mark.parametrize("line", [" /foo", "/usr is what?", "/usr/bin"])
def test_twin_what_is_no_command_is_answered(model, line):
    result = call("chat", model, "--max-new-tokens", 3, stdin=f"{line}\n")
    assert "/help" not in result.stderr
    assert result.stdout == clean(f"{reference(model, line, new_tokens=3)}\n")


def test_chat_ends_with_its_input(model):
    assert call("chat", model, stdin="").exit_code == 0


def test_a_template_for_one_turn_starts_anew_with_every_line(model, tmp_path):
    folder = tiny_llama(tmp_path / "plain", chat_template=False)  # so alpaca
    result = call("chat", folder, "--max-new-tokens", 3, stdin="one\none\n")
    first, second = result.stdout.splitlines()
    assert first == second
    (_, said), turns = result.stderr.splitlines(), call("chat", model, stdin="").stderr
    assert gives(said, "alpaca")
    assert turns.count("\n") == 1  # twin: a conversation goes on, and nothing is said of it


def test_a_conversation_that_has_grown_too_long_starts_anew(model):
    result = call("chat", model, "--max-new-tokens", 12, stdin=f"{'fish ' * 600}\nWhat is a heron?\n")
    assert "512 positions" in result.stderr
    assert result.stdout == clean(reference(model, "What is a heron?")) + "\n"


def test_ctrl_c_ends_the_answer_and_not_the_chat(model, monkeypatch):
    from surefoot.models import generate

    whole = generate.stream_text
    interrupted = []

    def stream(*arguments):
        yield "begun"
        if not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        yield from whole(*arguments)

    monkeypatch.setattr(generate, "stream_text", stream)
    result = call("chat", model, "--max-new-tokens", 3, stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout.startswith("begun …\nbegun")


def test_a_terminal_gets_a_prompt_and_a_hint(model, monkeypatch):
    class Terminal:
        def isatty(self) -> bool:
            return True

    typed = iter(["", "What is a heron?"])

    def type_line(prompt: str) -> str:
        assert prompt == "> "
        for line in typed:
            return line
        raise EOFError

    runner = CliRunner()
    with runner.isolation() as streams:
        monkeypatch.setattr(chat_module.sys, "stdin", Terminal())
        monkeypatch.setattr("builtins.input", type_line)
        main(["chat", str(model), "--max-new-tokens", "12"], standalone_mode=False)
        out, err = (stream.getvalue().decode() for stream in streams[:2])
    assert out == clean(reference(model, "What is a heron?")) + "\n\n"
    assert "/help" in err


def test_a_misspelt_run_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "my-run").mkdir(parents=True)
    monkeypatch.setattr("surefoot.models.folder.look_up", lambda *_: pytest.fail("asked the hub"))
    result = call("chat", "runs/my-rum")
    assert result.exit_code == 2
    assert prints_fault(result.stderr, "SF-FILE-MISSING", "runs/my-rum", "runs/my-run")
    (tmp_path / "runs" / "plan.json").write_text("{}")
    said = call("generate", "runs/plan.json", "--prompt", "x").stderr
    assert prints_fault(said, "SF-USE-FOLDER", "runs/plan.json", "runs")


def test_twin_a_hub_id_is(tmp_path, monkeypatch):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("surefoot.models.folder.fetch", lambda *_: tmp_path)
    monkeypatch.setattr(
        "surefoot.models.folder.look_up",
        lambda name, *_: asked.append(name) or Repository(name, "model", None, "", tmp_path, {}),
    )
    call("chat", "runs/my-rum")
    assert asked == ["runs/my-rum"]
