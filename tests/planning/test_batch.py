"""How many rows go through the model at once, and when activations are computed twice."""

import dataclasses

import pytest

from helpers.experts import moe_facts
from helpers.faults import gives, raises_fault
from helpers.model_layouts import LLAMA31_8B, LLAMA32_1B, llama3_tokenizer, model_facts, run_config
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning import batch as module
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.memory import fits, usable
from surefoot.planning.resolve import resolve
from surefoot.system.errors import InputError
from surefoot.system.hardware import GIB, preset
from surefoot.system.messages import size_text

TINY = LLAMA31_8B | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 4, "torch_dtype": "float32"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return read_tokenizer_facts(llama3_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def decide(tmp_path, tokenizer):
    def decide(config=LLAMA31_8B, *, hardware="h100", memory=None, lengths=None, **request):
        machine = preset(hardware)
        if memory is not None:
            machine = dataclasses.replace(machine, memory=int(memory * GIB))
        model = model_facts(tmp_path, config)
        return resolve(
            run_config(**request), model, tokenizer, machine, measurements=None, environment={}, lengths=lengths
        )

    return decide


def test_a_small_model_takes_the_whole_step_at_once(decide):
    plan = decide(TINY, batch={"size": 24}, data=_data(256))
    assert (plan.batch.micro.value, plan.batch.accumulation) == (24, 1)
    assert not plan.memory.gradient_checkpointing.value


def test_micro_is_the_most_that_fits_evened_out(decide):
    plan = decide(batch={"size": 16})
    micro = plan.batch.micro.value
    assert 1 < micro < 16
    assert fits(plan.memory)
    assert plan.batch.accumulation * micro >= 16 > (plan.batch.accumulation - 1) * micro
    one_micro_batch_fewer = -(-16 // (plan.batch.accumulation - 1))
    larger = decide(batch={"size": 16, "micro": one_micro_batch_fewer}, gradient_checkpointing="off")
    assert not fits(larger.memory)


def test_ignoring_the_memory_would_be_noticed(decide, monkeypatch):
    monkeypatch.setattr(module, "_most", lambda limit, fits: limit)
    with pytest.raises(AssertionError):
        test_micro_is_the_most_that_fits_evened_out(decide)


def test_the_search_finds_the_largest():
    for capacity in [0, 1, 5, 7, 63, 64, 1000]:
        for limit in [1, 2, 7, 64]:
            assert module._most(limit, lambda rows, most=capacity: rows <= most) == max(1, min(limit, capacity))


def test_known_lengths_make_room_for_more_rows_and_stop_where_the_device_is_busy(decide):
    short = LengthFacts(longest=256, typical=128, supervised=0.2)
    blind, seeing = decide(batch={"size": 64}), decide(batch={"size": 64}, lengths=short)
    assert seeing.batch.micro.value > blind.batch.micro.value
    laptop = decide(TINY, hardware="cpu", batch={"size": 96}, lengths=short)
    assert laptop.batch.micro.value == 3072 // 128
    assert f" {3072 // 128} rows " in laptop.batch.micro.reason


class TestCheckpointing:
    def test_only_where_one_example_does_not_fit_without(self, decide):
        roomy = decide(LLAMA32_1B, adapter={"kind": "lora"}, hardware="rtx4090", data=_data(2048))
        tight = decide(LLAMA32_1B, adapter={"kind": "lora"}, hardware="rtx4090", data=_data(16384))
        assert not roomy.memory.gradient_checkpointing.value
        assert tight.memory.gradient_checkpointing.value
        assert "would need" in tight.memory.gradient_checkpointing.reason

    def test_for_the_rows_that_were_asked_for(self, decide):
        assert not decide(batch={"size": 8, "micro": 1}).memory.gradient_checkpointing.value
        assert decide(batch={"size": 64, "micro": 64}).memory.gradient_checkpointing.value

    @pytest.mark.parametrize("asked", ["on", "off"])
    def test_on_request(self, decide, asked):
        choice = decide(TINY, gradient_checkpointing=asked).memory.gradient_checkpointing
        assert (choice.value, choice.source) == (asked == "on", "user")

    def test_in_as_many_layers_as_it_takes(self, decide):
        asked = {"adapter": {"kind": "lora"}, "data": _data(4096), "batch": {"size": 1, "micro": 1}}
        none, all_of_them = (decide(LLAMA32_1B, gradient_checkpointing=word, **asked).memory for word in ("off", "on"))
        middle = (none.total + all_of_them.total) / 2
        asked["memory"] = (middle + GIB) / 0.9 / GIB
        memory, layers = decide(LLAMA32_1B, **asked).memory, LLAMA32_1B["num_hidden_layers"]
        again = memory.recomputed
        assert again is not None
        assert 1 < again < layers
        assert fits(memory)
        assert f"{again} of {layers}" in memory.gradient_checkpointing.reason
        assert not fits(decide(LLAMA32_1B, gradient_checkpointing=again - 1, **asked).memory)

    def test_a_number_on_request(self, decide):
        memory = decide(TINY, gradient_checkpointing=1).memory
        assert (memory.recomputed, memory.layers_again(2)) == (1, 1)
        assert memory.gradient_checkpointing.source == "user"
        with pytest.raises(InputError) as caught:
            decide(TINY, gradient_checkpointing=3)
        assert [fault.where for fault in caught.value.faults] == ["gradient_checkpointing"]


class TestTooLarge:
    def test_states_that_do_not_fit_are_refused_with_the_figures(self, decide):
        with pytest.raises(InputError) as caught:
            decide(adapter=None, hardware="h100")
        # 16 bytes per parameter, bf16 copies of all but the embedding (133.6 GiB), and the head's gradient of a chunk.
        assert "136.6 GiB" in str(caught.value)
        assert "79.1 GiB" in str(caught.value)

    def test_where_no_length_helps_none_is_advised(self, decide):
        """124.8 of 139.8 GiB are usable: less than 136.6, and more than one pass takes, between which and the next no
        gradients are kept."""
        asked = {"adapter": None, "hardware": "h200", "data": _data(64)}
        plan = decide(batch={"size": 128, "micro": 1}, **asked)
        (caution,) = [one for one in plan.cautions if gives(one, "136.6") and gives(one, "124.8")]
        assert not any(gives(caution, key) for key in ("batch.micro", "data.max_length"))
        assert fits(decide(batch={"size": 1}, **asked).memory)  # twins
        assert decide(batch={"size": 64}, **asked).batch.micro.value == 64

    @pytest.mark.parametrize(
        ("micro", "length", "named"),
        [
            (1, 100_000, ["data.max_length"]),
            (64, 100_000, ["data.max_length"]),
            (64, 2048, ["batch.micro", "data.max_length"]),
        ],
    )
    def test_only_what_helps_is_advised(self, decide, micro, length, named):
        plan = decide(memory=24, data=_data(length), batch={"size": 64, "micro": micro})
        (caution,) = [one for one in plan.cautions if gives(one, "data.max_length")]
        assert [key for key in ("batch.micro", "data.max_length") if gives(caution, key)] == named

    def test_where_no_length_helps_checkpointing_is_advised(self, decide):
        """PEFT's DoRA keeps a square matrix for each target, 306 million numbers in each of 32 layers."""
        dora = {"adapter": {"kind": "dora", "rank": 16}, "kernels": {"adapter": "plain"}, "hardware": "rtx3090"}
        plan = decide(gradient_checkpointing="off", data=_data(16), batch={"size": 2, "micro": 1}, **dora)
        (caution,) = [one for one in plan.cautions if gives(one, "gradient_checkpointing")]
        assert not gives(caution, "data.max_length")
        assert fits(decide(gradient_checkpointing="on", data=_data(16), **dora).memory)  # twin: it does help

    def test_twin_states_beside_the_whole_memory_would_be_noticed(self, decide, monkeypatch):
        monkeypatch.setattr(module.memory, "usable", lambda available: available)
        with pytest.raises(ValueError):
            self.test_where_no_length_helps_none_is_advised(decide)

    def test_activations_that_do_not_fit_are_a_caution(self, decide):
        plan = decide(memory=20, data=_data(100_000), batch={"size": 1})
        assert plan.batch.micro.value == 1
        assert "data.max_length" in "\n".join(plan.cautions)

    def test_more_rows_than_a_step_has_are_refused(self, decide):
        with pytest.raises(InputError) as caught:
            decide(batch={"size": 4, "micro": 8})
        assert [fault.where for fault in caught.value.faults] == ["batch.micro"]


class TestExpertsThatMakeTheDifference:
    """Between what the states take with adapters on the experts and without lies the memory of the machine."""

    @pytest.fixture
    def states(self, tmp_path, tokenizer):
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 64, "num_hidden_layers": 4}
        facts = moe_facts(tmp_path, "mixtral", vocab_size=128_256, max_position_embeddings=8192, **sizes)

        def states(bytes_: int, *, length: int = 16, **adapter):
            machine = dataclasses.replace(preset("h100"), memory=bytes_)
            config = run_config(
                adapter={"kind": "lora", "rank": 16} | adapter,
                batch={"size": 2, "micro": 1},
                data=_data(length),
                gradient_checkpointing="off",
            )
            plan = resolve(config, facts, tokenizer, machine, measurements=None, environment={})
            memory = plan.memory
            return plan, memory.weights + memory.gradients + memory.optimizer

        return states

    def test_the_refusal_says_what_is_needed_without_them(self, states):
        more, less = states(80 * GIB)[1], states(80 * GIB, experts=False)[1]
        assert more > 1.2 * less
        with raises_fault(
            "SF-MEMORY",
            "model",
            *size_text(more).split()[:1],
            remedy=["adapter.experts", size_text(less).split()[0]],
        ):
            states((more + less) // 2)

    def test_where_it_makes_none_it_is_not_named(self, states):
        less = states(80 * GIB, experts=False)[1]
        for adapter in ({}, {"experts": False}):
            with pytest.raises(InputError) as caught:
                states(less // 2, **adapter)
            assert not gives(caught.value.faults[0].fix, "adapter.experts")

    def test_activations_that_fit_without_them_say_so_too(self, states):
        plans = [states(80 * GIB, length=4096, **one)[0].memory.total for one in ({}, {"experts": False})]
        room = sum(plans) // 2
        plan, _ = states(int((room + GIB) / 0.9) + 1, length=4096)
        (caution,) = [one for one in plan.cautions if "data.max_length" in one]
        assert gives(caution, "adapter.experts")
        assert gives(caution, size_text(plans[1]).split()[0])


@pytest.mark.parametrize(
    ("hardware", "asked", "bits", "adapts"),
    [
        ("t4", {"adapter": None}, [], True),
        ("l4", {"precision": {"base": "fp32"}}, ["16", "4"], False),
        ("t4", {}, ["4"], False),  # 16 GB of weights do not fit in 16 bits
        ("t4", {"precision": {"compute": "fp16"}}, ["4"], False),
    ],
)
def test_a_refusal_advises_what_the_run_does_not_do_yet_and_fits(decide, hardware, asked, bits, adapts):
    with pytest.raises(InputError) as refused:
        decide(hardware=hardware, **({"adapter": {"kind": "lora", "rank": 16}} | asked))
    (fault,) = [one for one in refused.value.faults if one.code == "SF-MEMORY"]
    assert gives(fault.fix, "adapter") == adapts
    assert [bit for bit in ("16", "4") if gives(fault.fix, bit)] == bits


def test_usable_leaves_room_for_what_is_not_counted():
    assert usable(10 * GIB) == 8 * GIB


def _data(length):
    return {"train": "unused.jsonl", "max_length": length}


def test_an_optimizer_in_host_memory_leaves_the_device_its_products(decide):
    """Llama-3.1-8B: of 32 layers with 218,103,808 linear weights each in bf16, of 1,050,939,392 others (2 x 128,256
    by 4,096, and 65 norms of 4,096) in fp32, and a copy of the head in bf16. In host memory 16 bytes of each of
    8,030,261,248, and three times the largest gradient, which is an embedding's."""
    found = decide(hardware="a40", adapter=None, parallel={"offload": "optimizer"}).memory
    linear, embedding = 32 * 218_103_808, 128_256 * 4096
    assert found.weights == 2 * linear + 4 * (2 * embedding + 65 * 4096) + 2 * embedding
    assert found.gradients == 2 * 4 * embedding
    assert found.optimizer == 0
    assert found.host == 16 * 8_030_261_248 + 3 * 4 * embedding


def test_host_memory_keeps_as_much_aside_as_a_device(decide, monkeypatch):
    """125.5 GiB of 128 would leave nothing for the system and Python: 0.9 x 128 - 1 = 114.2 are usable."""

    def cautions(**host):
        machine = dataclasses.replace(preset("a40"), **{name: size * GIB for name, size in host.items()})
        monkeypatch.setattr(f"{__name__}.preset", lambda name: machine)
        found = decide(adapter=None, parallel={"offload": "optimizer"}).cautions
        monkeypatch.undo()
        return [one for one in found if gives(one, "125.5")]

    (caution,) = cautions(host=128)
    assert all(gives(caution, one) for one in ("114.2", "128.0", "adamw_8bit"))
    assert not cautions(host=141)
    (caution,) = cautions(host=256, host_free=100)
    assert gives(caution, "100.0")
    assert not cautions(host=256, host_free=200)


def test_host_memory_that_is_too_small_is_refused(decide, monkeypatch):
    machine = dataclasses.replace(preset("a40"), host=100 * GIB)
    monkeypatch.setattr(f"{__name__}.preset", lambda name: machine)
    with raises_fault("SF-MEMORY", "parallel.offload", "125.5", "100.0"):
        decide(adapter=None, parallel={"offload": "optimizer"})
    assert decide(adapter=None, parallel={"offload": "optimizer"}, optim={"name": "adamw_8bit"}).memory.host < 100 * GIB
