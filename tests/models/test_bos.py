"""The BOS scaling against embeddings that are scaled by hand, wherever sequences begin; off again without a trace.

The twin of most tests is the hook of the tool that this comes from, which multiplies position 0 of whatever the
embedding is called with: right in a padded-right batch, and wrong everywhere else.
"""

import copy
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from helpers import zoo
from helpers.faults import raises_fault
from helpers.plans import adapter_plan, linear_names
from surefoot.data.batching.batch import Example, collate
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.adapters import add_adapter
from surefoot.models.bos import (
    bake,
    bake_obstacle,
    install_bos_scaling,
    installed_scaling,
    other_scale,
    sequence_starts,
    verify_bos_scaling,
)
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.embeddings import embedding_noise, noisy_embeddings
from surefoot.models.forward import hidden_states
from surefoot.models.generate import generate_answers
from surefoot.models.save import save_full
from surefoot.system.errors import EnvironmentFault

SCALE = 0.1
FIRST = 5  # the token that every sequence begins with, and that stands nowhere else
# Logits near 1 in fp32: a batched product adds in another order than a single row, and a cache than a whole sequence.
ROUNDING = 2e-5
# A loss summed over some thirty tokens, and its gradients, by two ways in fp32.
FP32_LOSS = 1e-4
# What the twin, a hook in the wrong place, moves the same numbers by at the least.
TELLING = 1e-2


@pytest.fixture
def load(zoo_model):
    return lambda name, **keys: AutoModelForCausalLM.from_pretrained(zoo_model(name, **keys)).eval()


@pytest.fixture
def llama(load):
    return load("llama3")


@contextmanager
def embedded_otherwise(model, change):
    """change: ids and their embeddings -> other embeddings."""
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, output: change(args[0], output))
    try:
        yield
    finally:
        handle.remove()


def as_the_original(model, scale=SCALE):
    """Position 0 of everything that goes through the embedding."""
    return embedded_otherwise(model, lambda _, output: torch.cat((output[:, :1] * scale, output[:, 1:]), dim=1))


def by_id(model, scale=SCALE):
    """An independent reference: the embedding of one id times the factor, which is the same where it begins sequences
    and stands nowhere else."""
    return embedded_otherwise(model, lambda ids, output: torch.where((ids == FIRST)[..., None], output * scale, output))


@contextmanager
def scaled(model, scale=SCALE):
    scaling = install_bos_scaling(model, scale)
    try:
        yield scaling
    finally:
        scaling.remove()


def prompt(length, seed=0):
    return [FIRST, *np.random.default_rng(seed).integers(6, 60, length - 1).tolist()]


def batch(lengths=(12, 7, 9), side="right", pad=1):
    rows = [Example(np.array(prompt(n, row)), np.ones(n, dtype=bool), row) for row, n in enumerate(lengths)]
    return collate(rows, pad, side)


def installed_scale(model) -> float:
    found = installed_scaling(model)
    return 1.0 if found is None else found.scale


def apart(one, other):
    return float((one - other).abs().max())


class TestSequenceStarts:
    embedded = torch.zeros(2, 4, 3)

    def starts(self, *args, **keys):
        return sequence_starts(self.embedded, *args, **keys).int().tolist()

    def test_without_a_mask_the_first_column(self):
        assert self.starts() == [[1, 0, 0, 0]] * 2

    def test_the_first_that_is_attended_to(self):
        mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
        assert self.starts(mask) == [[0, 0, 1, 0], [1, 0, 0, 0]]
        assert self.starts(mask.bool()) == self.starts(mask.float()) == self.starts(mask)
        assert self.starts(torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1]])) == [[0, 0, 0, 0], [1, 0, 0, 0]]

    def test_pads_have_position_0_and_begin_nothing(self):
        mask, positions = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])
        assert self.starts(mask, positions) == [[0, 0, 1, 0], [1, 0, 0, 0]]

    def test_documents_of_a_packed_row(self):
        positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])
        assert self.starts(None, positions) == [[1, 0, 1, 0], [1, 0, 0, 1]]
        assert self.starts(torch.ones(2, 4), positions) == [[1, 0, 1, 0], [1, 0, 0, 1]]
        assert self.starts(None, positions[:1]) == [[1, 0, 1, 0]] * 2

    @pytest.mark.parametrize("form", ["bool", "added", "by kind"])
    def test_a_prepared_mask(self, form):
        """Row 0: two pads in front. Row 1: two documents of two tokens."""
        seen = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
        seen[0, 0, 2, 2] = True
        seen[0, 0, 3, 2:] = True
        for query, keys in enumerate([[0], [0, 1], [2], [2, 3]]):
            seen[1, 0, query, keys] = True
        added = torch.zeros(2, 1, 4, 4).masked_fill(~seen, torch.finfo(torch.float32).min)
        mask = {"bool": seen, "added": added, "by kind": {"sliding_attention": None, "full_attention": seen}}[form]
        assert self.starts(mask) == [[0, 0, 1, 0], [1, 0, 1, 0]]

    def test_behind_a_cache_nothing_begins(self):
        cache = DynamicCache()
        cache.update(torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 3, 2), 0)
        assert self.starts(None, None, cache) == [[0] * 4] * 2
        assert self.starts(torch.ones(2, 7), None, cache) == [[0] * 4] * 2
        late = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])  # a prompt that is read in pieces
        assert self.starts(late, None, cache) == [[0, 1, 0, 0], [0, 0, 0, 0]]

    def test_another_form_of_mask_is_refused(self):
        with pytest.raises(ValueError, match="2 or 4 dimensions"):
            self.starts(torch.ones(2, 4, 4))
        with pytest.raises(ValueError, match="2 or 4 dimensions"):
            self.starts(object())


@pytest.mark.parametrize("family", zoo.ZOO)
class TestEveryFamily:
    @torch.no_grad()
    def test_right_padding_without_a_mask(self, load, family):
        model, data = load(family), batch()
        embedded = model.get_input_embeddings()(data.input_ids).clone()
        embedded[:, 0] *= SCALE
        wanted = model.get_decoder()(inputs_embeds=embedded, use_cache=False).last_hidden_state
        plain = hidden_states(model, data)
        with scaled(model):
            found = hidden_states(model, data)
            as_words = model(data.input_ids, use_cache=False).logits  # ids by position, not by name
        assert torch.equal(found, wanted)
        assert apart(found, plain) > TELLING
        with by_id(model):
            assert torch.equal(as_words, model(data.input_ids, use_cache=False).logits)
        assert torch.equal(hidden_states(model, data), plain)  # and off again

    @torch.no_grad()
    def test_left_padding(self, load, family):
        model, data = load(family), batch(side="left")
        with by_id(model):
            wanted = hidden_states(model, data)
        with scaled(model):
            found = hidden_states(model, data)
        real = data.attention_mask.bool()
        assert apart(found[real], wanted[real]) == 0
        with as_the_original(model):
            assert apart(hidden_states(model, data)[real], wanted[real]) > TELLING

    @torch.no_grad()
    def test_a_packed_row_is_its_documents(self, load, family):
        """Two documents in one row, separated by a mask and by positions that begin again."""
        model = load(family)
        one, two = prompt(6, 1), prompt(5, 2)
        ids = torch.tensor([one + two])
        positions = torch.tensor([[*range(6), *range(5)]])
        seen = torch.zeros(11, 11, dtype=torch.bool)
        seen[:6, :6] = seen[6:, 6:] = True
        mask = torch.zeros(1, 1, 11, 11).masked_fill(~seen.tril(), torch.finfo(torch.float32).min)
        with scaled(model):
            whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]
            parts = [model(torch.tensor([part]), use_cache=False).logits[0] for part in (one, two)]
        assert apart(whole, torch.cat(parts)) < ROUNDING
        with as_the_original(model):
            wrong = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]
        assert apart(wrong, torch.cat(parts)) > TELLING

    def test_cached_decoding_scales_the_prompt_alone(self, load, family):
        model = load(family)
        prompts, asked = [prompt(9), prompt(4, 1)], {"max_new_tokens": 8, "stop_ids": [], "pad_id": 1}
        with scaled(model):
            found = [answer.ids for answer in generate_answers(model, _NoWords(), prompts, **asked)]
            whole = [_without_a_cache(model, one, 8) for one in prompts]
        assert found == whole

    def test_transformers_generate_with_beams(self, load, family):
        """With a left-padded batch and its own cache; the reference scales by id, which generation may not pick."""
        model, data = load(family), batch((9, 4), side="left")
        asked = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "suppress_tokens": [FIRST]}
        asked |= {"attention_mask": data.attention_mask, "pad_token_id": 1, "eos_token_id": None, "output_scores": True}
        asked |= {"return_dict_in_generate": True}
        with scaled(model):
            found = model.generate(data.input_ids, **asked)
        with by_id(model):
            wanted = model.generate(data.input_ids, **asked)
        assert torch.equal(found.sequences, wanted.sequences)
        assert torch.equal(found.sequences_scores, wanted.sequences_scores)
        with as_the_original(model):  # twin: every generated token is scaled
            assert apart(model.generate(data.input_ids, **asked).sequences_scores, wanted.sequences_scores) > 1e-4

    def test_what_the_first_layer_gets_is_measured(self, load, family):
        model = load(family)
        for side in ("right", "left"):
            with scaled(model, 0.25):
                found = verify_bos_scaling(model, batch(side=side), 0.25)
            assert found["factor"] == pytest.approx([0.25, 0.25], abs=1e-5)
            assert found["sequences"] == 3


class _NoWords:
    def decode(self, ids, skip_special_tokens):
        return ""


@torch.no_grad()
def _without_a_cache(model, ids, count):
    """Greedy, the whole sequence anew for every token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[-count:])


class TestInTraining:
    def losses(self, model, data):
        """Loss and all gradients."""
        model.train().zero_grad()
        loss = sft_loss(model, data).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def same(self, one, other):
        assert one[1].keys() == other[1].keys()
        assert float(one[0]) == pytest.approx(float(other[0]), abs=FP32_LOSS)
        return max(apart(one[1][name], other[1][name]) for name in one[1])

    @pytest.mark.parametrize("scale", [0.1, 0.0])
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_gradients_are_those_of_embeddings_scaled_by_hand(self, llama, scale, side):
        data = batch(side=side)
        with by_id(llama, scale):
            wanted = self.losses(llama, data)
        with scaled(llama, scale):
            found = self.losses(llama, data)
        assert self.same(found, wanted) < FP32_LOSS
        plain = self.losses(llama, data)
        assert abs(float(plain[0] - wanted[0])) > TELLING

    @pytest.mark.parametrize("scale", [0.1, 0.0])
    def test_with_gradient_checkpointing(self, llama, scale):
        data = batch()
        with scaled(llama, scale):
            wanted = self.losses(llama, data)
            enable_gradient_checkpointing(llama)
            found = self.losses(llama, data)
            two = sft_loss(llama, data).loss, sft_loss(llama, batch((5, 8))).loss  # a layer is computed again later
            llama.zero_grad()
            two[0].backward()
            again = {name: p.grad.clone() for name, p in llama.named_parameters()}
        assert self.same(found, wanted) == 0
        assert all(torch.equal(again[name], wanted[1][name]) for name in again)

    @pytest.mark.parametrize("kind", ["lora", "dora"])
    def test_under_peft(self, llama, kind):
        """PEFT calls the model's forward past its hooks; the decoder's stay."""
        data = batch()
        adapted = add_adapter(llama, adapter_plan(linear_names(llama), kind=kind), seed=1, base="b")
        with by_id(adapted):
            wanted = self.losses(adapted, data)
        with scaled(adapted):
            found = self.losses(adapted, data)
            adapted.eval()
            logits = adapted(input_ids=data.input_ids).logits
        with by_id(adapted):
            assert torch.equal(logits, adapted(input_ids=data.input_ids).logits)
        assert self.same(found, wanted) < FP32_LOSS

    def test_noise_comes_before_the_factor(self, llama):
        """So that 0 times whatever is 0, in training as in use."""
        data = batch()
        llama.train()
        for scale in (0.1, 0.0):
            with scaled(llama, scale), noisy_embeddings(llama, 5.0, data.lengths), torch.no_grad():
                torch.manual_seed(3)
                found = hidden_states(llama, data)
            with torch.no_grad():
                torch.manual_seed(3)
                embedded = llama.get_input_embeddings()(data.input_ids)
                embedded = embedded + embedding_noise(embedded, 5.0, data.lengths)
                embedded[:, 0] *= scale
                wanted = llama.get_decoder()(inputs_embeds=embedded, use_cache=False).last_hidden_state
            assert torch.equal(found, wanted)

    @pytest.mark.slow
    @pytest.mark.parametrize(("scale", "checkpointed"), [(0.1, False), (0.0, True)])
    def test_a_compiled_decoder(self, load, scale, checkpointed):
        torch._dynamo.reset()
        model, data = load("llama3", num_hidden_layers=1), batch()
        if checkpointed:
            enable_gradient_checkpointing(model)
        with scaled(model, scale):
            wanted = self.losses(model, data), self.losses(model, batch((6, 10)))
        plain = self.losses(model, data)
        model.get_decoder().compile(backend="aot_eager", dynamic=True)  # as set-up does, with another backend
        with scaled(model, scale):
            verify_bos_scaling(model, data, scale)
            found = self.losses(model, data), self.losses(model, batch((6, 10)))
            verify_bos_scaling(model, data, scale)
        for one, other in zip(found, wanted, strict=True):
            assert self.same(one, other) < FP32_LOSS
        assert abs(float(plain[0] - found[0][0])) > TELLING
        torch._dynamo.reset()


class TestInstalling:
    def test_once_is_enough_and_the_last_factor_counts(self, llama):
        data = batch()
        install_bos_scaling(llama, 0.5)
        install_bos_scaling(llama, 0.5)
        with torch.no_grad():
            twice = hidden_states(llama, data)
            install_bos_scaling(llama, 0.1)
            found = hidden_states(llama, data)
            assert installed_scale(llama) == 0.1
            install_bos_scaling(llama, 1.0)
            assert (installed_scale(llama), installed_scaling(llama)) == (1.0, None)
            with by_id(llama, 0.5):
                assert torch.equal(twice, hidden_states(llama, data))
            with by_id(llama, 0.1):
                assert torch.equal(found, hidden_states(llama, data))

    def test_nothing_of_it_stays(self, llama, tmp_path):
        def hooks():
            return [
                len(getattr(module, name))
                for module in llama.modules()
                for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
            ]

        before, names, attributes = hooks(), list(llama.state_dict()), set(vars(llama.get_decoder()))
        scaling = install_bos_scaling(llama, 0.0)
        assert list(llama.state_dict()) == names
        assert list(llama.named_modules()) == list(llama.named_modules())
        save_full(llama, tmp_path)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert all(torch.equal(saved.state_dict()[name], tensor) for name, tensor in llama.state_dict().items())
        scaling.remove()
        scaling.remove()
        assert hooks() == before
        assert set(vars(llama.get_decoder())) == attributes

    def test_a_wrapped_model(self, llama):
        """As DistributedDataParallel and torch.compile wrap one."""

        class Wrapper(nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module

            def forward(self, *args, **keys):
                return self.module(*args, **keys)

        data, wrapped = batch(), Wrapper(Wrapper(llama))
        install_bos_scaling(wrapped, 0.1)
        with torch.no_grad():
            found = wrapped(data.input_ids).logits
            assert installed_scale(wrapped) == installed_scale(llama) == 0.1
            assert installed_scale(torch.compile(llama, backend="eager")) == 0.1
            install_bos_scaling(llama, 1.0)
            with by_id(llama):
                assert torch.equal(found, llama(data.input_ids).logits)

    def test_a_copy_has_its_own(self, llama):
        install_bos_scaling(llama, 0.1)
        other, data = copy.deepcopy(llama), batch()
        installed_scaling(other).remove()
        with torch.no_grad():
            assert apart(hidden_states(other, data), hidden_states(llama, data)) > TELLING
            again = copy.deepcopy(llama)
            assert torch.equal(hidden_states(again, data), hidden_states(llama, data))

    @torch.no_grad()
    def test_embeddings_handed_over_are_scaled_too(self, llama):
        data = batch()
        with scaled(llama):
            found = llama(inputs_embeds=llama.get_input_embeddings()(data.input_ids)).logits
            assert torch.equal(found, llama(data.input_ids).logits)
            with pytest.raises(ValueError, match="exactly one"):
                llama()

    @pytest.mark.parametrize("scale", [-0.1, float("nan"), float("inf")])
    def test_what_is_no_factor_is_refused(self, llama, scale):
        with pytest.raises(ValueError, match="finite number"):
            install_bos_scaling(llama, scale)


class TestMeasured:
    """Twins of `verify_bos_scaling`: each breaks the scaling, and must be found."""

    @pytest.mark.parametrize(
        ("breaking", "side", "found"),
        [(nullcontext, "right", 1), (lambda model: scaled(model, 0.11), "right", 0.11), (as_the_original, "left", 1)],
        ids=["none is installed", "another factor", "the original's hook"],
    )
    def test_another_factor_than_the_planned_one(self, llama, breaking, side, found):
        with breaking(llama), raises_fault("SF-PLAN-BROKEN", "plan: bos.scale", 0.1, found):
            verify_bos_scaling(llama, batch(side=side), 0.1)

    def test_a_second_token_is_touched(self, llama, monkeypatch):
        def one_too_many(*args):
            starts = sequence_starts(*args)
            return starts | starts.roll(1, dims=1)

        monkeypatch.setattr("surefoot.models.bos.sequence_starts", one_too_many)
        with scaled(llama), raises_fault("SF-PLAN-BROKEN", "plan: bos.scale"):
            verify_bos_scaling(llama, batch(), 0.1)

    def test_a_model_that_normalizes_its_embeddings(self, llama):
        """There a factor changes nothing, which nobody would notice."""
        norm = nn.LayerNorm(32)
        llama.get_decoder().layers[0].register_forward_pre_hook(lambda layer, args: (norm(args[0]), *args[1:]))
        with scaled(llama), raises_fault("SF-PLAN-BROKEN", "plan: bos.scale"):
            verify_bos_scaling(llama, batch(), 0.1)

    @torch.no_grad()
    def test_an_embedding_of_zeros_shows_no_factor(self, llama, monkeypatch):
        """As the row of BOS in an export with a factor of 0, which can be trained further."""
        data = batch()
        llama.get_input_embeddings().weight[FIRST] = 0
        with scaled(llama):
            found = verify_bos_scaling(llama, data, 0.1)
            assert found == {"planned": 0.1, "factor": None, "sequences": 0, "left_out_as_zero": 3, "others_changed": 0}
            data.input_ids[0, 0] = 7
            found = verify_bos_scaling(llama, data, 0.1)
            assert (found["sequences"], found["left_out_as_zero"]) == (1, 2)
            assert found["factor"] == pytest.approx([0.1, 0.1], abs=1e-5)
        with scaled(llama, 0.2), raises_fault("SF-PLAN-BROKEN", "plan: bos.scale", 0.2):  # twin: the others still count
            verify_bos_scaling(llama, data, 0.1)

        def bent(embedded, starts, scale):
            return embedded + starts[..., None] * (embedded == 0)

        monkeypatch.setattr("surefoot.models.bos._scaled", bent)
        with scaled(llama), pytest.raises(EnvironmentFault):  # twin: what is zero must come in as zero
            verify_bos_scaling(llama, batch(), 0.1)

    def test_a_first_token_that_never_arrives_is_no_zero_embedding(self, llama):
        def lose(layer, args):
            return (args[0] * (torch.arange(args[0].shape[1]) > 0)[:, None], *args[1:])

        llama.get_decoder().layers[0].register_forward_pre_hook(lose)
        with scaled(llama), raises_fault("SF-PLAN-BROKEN", "plan: bos.scale", "nan"):
            verify_bos_scaling(llama, batch(), 0.1)

    def test_in_bf16_under_autocast(self, load):
        for family in ("llama3", "gpt2", "opt"):
            model = load(family).bfloat16()
            with scaled(model), torch.autocast("cpu", dtype=torch.bfloat16):
                assert verify_bos_scaling(model, batch(), 0.1)["factor"] == pytest.approx([0.1, 0.1], abs=0.01)

    def test_training_mode_and_the_factor_come_back(self, llama):
        with scaled(llama) as scaling:
            verify_bos_scaling(llama.train(), batch(), 0.1)
            assert llama.training
            assert scaling.scale == 0.1
            with other_scale(scaling, 0.7):
                assert installed_scale(llama) == 0.7


FREE = {"bos_id": FIRST, "ends": (2,), "pad_id": 1, "tied": False}


class TestBaking:
    @torch.no_grad()
    @pytest.mark.parametrize("scale", [0.1, 0.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_row_does_what_the_hook_does(self, llama, scale, dtype):
        model, data = llama.to(dtype), batch(side="left")
        real = data.attention_mask.bool()
        install_bos_scaling(model, scale)
        wanted = model(data.input_ids, attention_mask=data.attention_mask).logits
        bake(model, FIRST, scale)
        assert installed_scale(model) == 1.0
        found = model(data.input_ids, attention_mask=data.attention_mask).logits
        assert torch.equal(found[real], wanted[real])
        bake(model, FIRST, 0.5)  # twin: once more is another model
        assert scale == 0 or apart(model(data.input_ids, attention_mask=data.attention_mask).logits, found) > 0

    def test_whatever_is_in_the_way_has_a_reason_of_its_own(self):
        assert bake_obstacle(**FREE) == ""
        changes = ({"bos_id": None}, {"ends": (2, FIRST)}, {"pad_id": FIRST}, {"tied": True}, {"repeats_bos": True})
        reasons = {bake_obstacle(**(FREE | change)) for change in changes}
        assert "" not in reasons
        assert len(reasons) == len(changes)

    def test_a_tied_head_would_be_scaled_and_is_refused(self, load):
        model = load("qwen2")
        row = model.get_input_embeddings().weight[FIRST].clone()
        with raises_fault("SF-BOS", "bos.scale"):
            bake(model, FIRST, 0.1)
        assert torch.equal(model.get_input_embeddings().weight[FIRST], row)
