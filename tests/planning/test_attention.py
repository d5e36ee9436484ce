"""Which attention a run gets, and whether the rules about kernels agree with torch's own dispatch."""

import itertools
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.faults import gives
from helpers.model_layouts import run_config
from surefoot.config.contradictions import contradictions
from surefoot.planning import attention as module
from surefoot.planning.attention import ORDER, obstacle, plan_attention
from surefoot.planning.deterministic import with_deterministic
from surefoot.planning.measurements import AttentionTrial
from surefoot.planning.notes import Notes
from surefoot.system.hardware import Hardware, preset

CPU, H100 = preset("cpu"), preset("h100")
T4 = Hardware("Tesla T4", "cuda", 2**34, (7, 5), bf16=False, fp16=True, tf32=False, cores=4, preset=False)
BACKEND = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
NAME = {0: "math", 1: "flash", 2: "mem_efficient", 3: "cudnn"}


def decide(request="auto", *, hardware=CPU, compute="fp32", head_dim=64, dropout=0.0, trials=(), **facts):
    """What `resolve` does: the config's own contradictions, then the policy."""
    notes = Notes()
    config = run_config(attention=request)
    for problem in contradictions(config):
        notes.refuse(problem.key, problem.what, problem.fix)
    plan = plan_attention(
        config.attention,
        hardware=hardware,
        compute=compute,
        head_dim=head_dim,
        dropout=dropout,
        trials=trials,
        notes=notes,
        **facts,
    )
    return plan, notes


def trial(form, milliseconds=1.0, failure=""):
    return AttentionTrial(form, 0.0 if failure else milliseconds / 1000, failure)


def summary(plan):
    return plan.implementation.value, plan.kernels.value, plan.expected.value


def keys(notes):
    return [fault.where for fault in notes.faults]


def dispatched(dtype, dropout, allowed):
    """What torch says it would run on a CPU; None where no allowed kernel can."""
    q = torch.zeros(1, 2, 40, 16, dtype=dtype, requires_grad=True)
    with warnings.catch_warnings(), sdpa_kernel([BACKEND[kernel] for kernel in allowed]):
        warnings.simplefilter("ignore")
        try:
            return NAME.get(torch._fused_sdp_choice(q, q, q, None, dropout, True))
        except RuntimeError:
            return None


def check_the_rules_agree_with_torch_on_a_cpu(dtype, dropout):
    compute = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    for size in range(1, 5):
        for allowed in itertools.combinations(ORDER, size):
            usable = [kernel for kernel in allowed if not obstacle(kernel, CPU, compute, 16, dropout)]
            assert dispatched(dtype, dropout, allowed) == (usable[0] if usable else None), allowed


def test_the_rules_agree_with_torch_on_a_cpu():
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        for dropout in [0.0, 0.1]:
            check_the_rules_agree_with_torch_on_a_cpu(dtype, dropout)


def test_a_rule_that_forgets_dropout_is_noticed(monkeypatch):
    def forgetful(kernel, hardware, compute, head_dim, dropout):
        return module.obstacle(kernel, hardware, compute, head_dim, 0.0)

    monkeypatch.setitem(globals(), "obstacle", forgetful)
    with pytest.raises(AssertionError):
        check_the_rules_agree_with_torch_on_a_cpu(torch.float32, 0.1)


def test_default():
    for hardware, compute, dropout, kernels_, expected in [
        (CPU, "fp32", 0.0, ("flash", "math"), "flash"),
        (CPU, "bf16", 0.0, ("flash", "math"), "flash"),
        (CPU, "fp32", 0.1, ("math",), "math"),
        (H100, "bf16", 0.0, ("flash", "mem_efficient", "math"), "flash"),
        (H100, "bf16", 0.1, ("flash", "mem_efficient", "math"), "flash"),
        (H100, "fp32", 0.0, ("mem_efficient", "math"), "mem_efficient"),
        (T4, "fp16", 0.0, ("mem_efficient", "math"), "mem_efficient"),
    ]:
        plan, notes = decide(hardware=hardware, compute=compute, dropout=dropout)
        assert not notes.faults
        assert summary(plan) == ("sdpa", kernels_, expected)


def test_why_flash_is_not_used_is_said():
    assert "attention_dropout 0.1" in decide(dropout=0.1)[0].kernels.reason
    assert gives(decide(hardware=H100)[0].kernels.reason, "fp32")
    assert "196678" in decide(hardware=H100, compute="bf16")[0].kernels.reason


class TestMeasured:
    def test_a_clear_gain_leaves_the_default(self):
        plan, _ = decide(trials=[trial("flash", 3.0), trial("eager", 1.0), trial("math", 2.0)])
        assert summary(plan) == ("eager", (), "eager")
        assert plan.implementation.source == "measured"
        assert "flash 3" in plan.implementation.reason

    def test_a_small_one_does_not(self):
        plan, _ = decide(trials=[trial("flash", 1.4), trial("eager", 1.0)])
        assert summary(plan) == ("sdpa", ("flash", "math"), "flash")
        assert plan.expected.source == "measured"

    def test_a_lower_bar_would_be_noticed(self, monkeypatch):
        monkeypatch.setattr(module, "_GAIN", 1.0)
        with pytest.raises(AssertionError):
            self.test_a_small_one_does_not()

    def test_a_form_that_failed_its_check_never_wins(self):
        plan, notes = decide(trials=[trial("flash", 3.0), trial("eager", failure="the output is not finite")])
        assert plan.expected.value == "flash"
        assert not notes.cautions

    def test_a_default_that_failed_its_check_is_replaced_with_a_caution(self):
        plan, notes = decide(trials=[trial("flash", failure="the output is not finite"), trial("math", 9.0)])
        assert summary(plan) == ("sdpa", ("math",), "math")
        assert "not finite" in notes.cautions[0]

    def test_nothing_passed(self):
        _, notes = decide(trials=[trial("flash", failure="broken"), trial("math", failure="broken too")])
        assert keys(notes) == ["attention"]
        assert "broken too" in str(notes.faults[0])

    def test_sdpa_on_request_never_becomes_eager(self):
        plan, _ = decide("sdpa", trials=[trial("flash", 3.0), trial("eager", 1.0), trial("math", 2.0)])
        assert summary(plan) == ("sdpa", ("math",), "math")
        assert plan.implementation.source == "user"

    def test_what_keeps_all_scores_does_not_win_where_a_vision_tower_takes_it_too(self):
        trials = [trial("flash", 3.0), trial("eager", 1.0), trial("math", 1.5)]
        assert summary(decide(trials=trials, pictures=True)[0]) == ("sdpa", ("flash", "math"), "flash")
        assert decide(trials=trials)[0].expected.value == "eager"  # twin: of texts alone it does
        faster = [trial("flash", 3.0), trial("mem_efficient", 1.0)]
        plan, _ = decide(hardware=H100, compute="bf16", trials=faster, pictures=True)
        assert plan.expected.value == "mem_efficient"

    def test_it_still_stands_in_for_a_kernel_that_failed(self):
        trials = [trial("flash", failure="the output is not finite"), trial("math", 9.0)]
        assert decide(trials=trials, pictures=True)[0].expected.value == "math"

    @pytest.mark.parametrize(
        ("uniform", "pictures", "expected"),
        [(True, False, "cudnn"), (False, False, "flash"), (True, True, "flash"), (False, True, "flash")],
    )
    def test_cudnn_wins_where_all_examples_have_one_length_and_no_tower_gives_it_masks(
        self, uniform, pictures, expected
    ):
        trials = [trial("flash", 3.0), trial("cudnn", 2.0)]
        plan, _ = decide(hardware=H100, compute="bf16", trials=trials, uniform=uniform, pictures=pictures)
        assert plan.expected.value == expected
        assert ("cudnn" in plan.kernels.value) is (expected == "cudnn")

    def test_nor_where_a_window_gives_it_masks(self):
        trials = [trial("mem_efficient", 3.0), trial("cudnn", 1.0)]
        named = {"hardware": H100, "compute": "bf16", "trials": trials, "uniform": True}
        assert decide(masked=module.mask_reason(512, 2048), **named)[0].expected.value == "mem_efficient"

    def test_twin_it_does_not_where_it_failed_its_check(self):
        trials = [trial("flash", 3.0), trial("cudnn", failure="the gradient of q is not finite")]
        assert decide(hardware=H100, compute="bf16", trials=trials, uniform=True)[0].expected.value == "flash"

    @pytest.mark.parametrize(("hardware", "compute", "expected"), [(CPU, "fp32", "flash"), (H100, "bf16", "cudnn")])
    def test_on_a_gpu_less_of_a_lead_is_clear(self, hardware, compute, expected):
        other = "math" if hardware is CPU else "cudnn"
        trials = [trial("flash", 1.3), trial(other, 1.0)]
        assert decide(hardware=hardware, compute=compute, trials=trials, uniform=True)[0].expected.value == expected
        close = [trial("flash", 1.1), trial(other, 1.0)]
        assert decide(hardware=hardware, compute=compute, trials=close, uniform=True)[0].expected.value == "flash"


class TestRightButNotTimed:
    """As where other programs hold the memory of a GPU. Nothing is wrong then, and nothing is known to be faster."""

    NO_ROOM = AttentionTrial("math", 0.0, "", untimed="no room")

    def test_the_default_stays_where_nobody_could_time_it(self):
        flash = AttentionTrial("flash", 0.0, "", untimed="OOM")
        plan, notes = decide(trials=[flash, trial("eager", 9.0)])
        assert summary(plan)[1:] == (("flash", "math"), "flash")
        assert plan.expected.source == "default"  # nothing was held against it
        assert gives(plan.expected.reason, "OOM")
        assert not notes.cautions
        assert not notes.faults

    def test_twin_one_that_was_timed_says_what_it_was_held_against(self):
        plan, _ = decide(trials=[trial("flash", 1.0), trial("eager", 9.0)])
        assert plan.expected.source == "measured"
        assert gives(plan.expected.reason, 1.5)
        assert "flash 1, eager 9" in plan.expected.reason

    def test_a_winner_that_nobody_timed_shows_no_times(self):
        plan, _ = decide(trials=[self.NO_ROOM, AttentionTrial("flash", 0.0, "wrong")])
        assert "milliseconds" not in plan.kernels.reason
        assert "flash: wrong" in plan.kernels.reason

    def test_it_loses_to_none_and_beats_none(self):
        plan, _ = decide(trials=[trial("flash", 1.0), self.NO_ROOM])
        assert plan.expected.value == "flash"
        assert "math" not in plan.expected.reason

    def test_alone_it_is_no_reason_to_refuse(self):
        plan, notes = decide(trials=[self.NO_ROOM, AttentionTrial("flash", 0.0, "is off")])
        assert not notes.faults
        assert plan.expected.value == "math"  # flash is wrong, and math is right
        assert keys(decide(trials=[trial("math", failure="is off"), trial("flash", failure="is off")])[1]) == [
            "attention"
        ]

    def test_a_kernel_that_was_asked_for_runs(self):
        assert not decide({"math": "on"}, trials=[self.NO_ROOM])[1].faults
        assert keys(decide({"math": "on"}, trials=[trial("math", failure="is off")])[1]) == ["attention.math"]


class TestSwitches:
    def test_off_takes_a_kernel_away(self):
        plan, notes = decide({"flash": "off"})
        assert summary(plan) == ("sdpa", ("math",), "math")
        assert not notes.faults
        assert plan.kernels.source == "user"

    def test_seed_002s_settings(self):
        plan, notes = decide({"flash": "off", "mem_efficient": "on", "math": "on"}, hardware=H100, compute="bf16")
        assert not notes.faults
        assert summary(plan) == ("sdpa", ("mem_efficient", "math"), "mem_efficient")

    def test_seed_000s_settings(self):
        plan, notes = decide({"implementation": "sdpa", "cudnn": "off"}, hardware=H100, compute="bf16")
        assert not notes.faults
        assert summary(plan) == ("sdpa", ("flash", "mem_efficient", "math"), "flash")

    def test_cudnn_runs_when_it_is_asked_for(self):
        plan, notes = decide({"cudnn": "on"}, hardware=H100, compute="bf16")
        assert not notes.faults
        assert plan.expected.value == "cudnn"

    def test_but_not_where_it_failed_the_check_here(self):
        _, notes = decide({"cudnn": "on"}, hardware=H100, compute="bf16", trials=[trial("cudnn", failure="NaN")])
        assert keys(notes) == ["attention.cudnn"]

    def test_all_off_is_refused(self):
        everything = dict.fromkeys(("flash", "mem_efficient", "cudnn", "math"), "off")
        for implementation in ("auto", "sdpa"):
            assert keys(decide({"implementation": implementation, **everything})[1]) == ["attention.implementation"]

    def test_so_is_leaving_only_what_cannot_run(self):
        _, notes = decide({"math": "off"}, dropout=0.1)
        assert keys(notes) == ["attention"]
        assert "attention_dropout" in str(notes.faults[0])

    @pytest.mark.parametrize(
        ("hardware", "why"),
        [(CPU, "NVIDIA"), (H100, "on")],
    )
    def test_cudnn_does_not_step_in_for_what_was_switched_off(self, hardware, why):
        _, notes = decide(dict.fromkeys(("flash", "mem_efficient", "math"), "off"), hardware=hardware, compute="bf16")
        assert keys(notes) == ["attention"]
        (of_cudnn,) = [one for one in notes.faults[0].what.split("; ") if gives(one, "cudnn")]
        assert gives(of_cudnn, why)

    def test_a_kernel_that_cannot_run_is_refused_when_asked_for(self):
        for kernel, hardware, compute, dropout, says in [
            ("flash", H100, "fp32", 0.0, "bf16"),
            ("flash", T4, "fp16", 0.0, "8.0"),  # the compute capability that it needs
            ("flash", CPU, "fp32", 0.1, "dropout"),
            ("mem_efficient", CPU, "fp32", 0.0, "NVIDIA"),
            ("cudnn", CPU, "bf16", 0.0, "NVIDIA"),
        ]:
            _, notes = decide({kernel: "on"}, hardware=hardware, compute=compute, dropout=dropout)
            assert f"attention.{kernel}" in keys(notes)
            assert gives(notes.faults[0].what, says)

    def test_heads_beyond_256_do_not_fit_flash(self):
        assert not decide({"flash": "on"}, hardware=H100, compute="bf16", head_dim=256)[1].faults
        assert decide({"flash": "on"}, hardware=H100, compute="bf16", head_dim=264)[1].faults

    def test_switches_mean_nothing_outside_sdpa(self):
        for name in ("eager", "flash_attention_2"):
            on, off = ({"implementation": name, "flash": switch} for switch in ("on", "off"))
            assert keys(decide(on, hardware=H100, compute="bf16")[1]) == ["attention.flash"]
            plan, notes = decide(off, hardware=H100, compute="bf16")
            assert not notes.faults  # nothing of SDPA runs, so flash does not either
            assert summary(plan) == (name, (), name)


class TestOtherImplementations:
    def test_eager_is_honoured(self):
        plan, notes = decide("eager", trials=[trial("flash", 1.0), trial("eager", 9.0)])
        assert summary(plan) == ("eager", (), "eager")
        assert not notes.faults

    @pytest.mark.parametrize(("compute", "cautions"), [("fp32", 0), ("bf16", 1), ("fp16", 1)])
    def test_eager_in_16_bits_is_a_caution_where_there_is_another(self, compute, cautions):
        assert len(decide("eager", hardware=H100, compute=compute)[1].cautions) == cautions
        assert not decide("eager", hardware=H100, compute=compute, without_sdpa="caps its scores")[1].cautions
        assert not decide("sdpa", hardware=H100, compute=compute)[1].cautions

    @pytest.mark.parametrize(
        ("hardware", "compute", "says"),
        [
            (CPU, "bf16", "NVIDIA"),
            (T4, "fp16", "8.0"),  # the compute capability that it needs
            (H100, "fp32", "bf16"),
            (T4, "fp32", "bf16"),
        ],
    )
    def test_flash_attention_2_is_refused_where_it_cannot_run(self, hardware, compute, says):
        _, notes = decide("flash_attention_2", hardware=hardware, compute=compute)
        assert any(gives(fault.what, says) for fault in notes.faults)
        assert "attention.implementation: sdpa" in notes.faults[0].fix  # the whole key: it becomes the word of a tool

    def test_or_is_not_installed(self):
        here = Hardware("H100", "cuda", 2**36, (9, 0), True, True, True, 16, preset=False, flash_attention_2=False)
        _, notes = decide("flash_attention_2", hardware=here, compute="bf16")
        assert "not installed" in str(notes.faults[0])

    def test_whether_another_machine_has_it_is_left_open(self):
        plan, notes = decide("flash_attention_2", hardware=H100, compute="bf16")
        assert not notes.faults
        assert summary(plan) == ("flash_attention_2", (), "flash_attention_2")
        assert "flash-attn" in notes.cautions[0]


class TestWindow:
    """A window that the longest example reaches gives SDPA a mask; torch's flash kernel on a GPU takes none."""

    def plan(self, window, longest, hardware=H100, request="auto"):
        return decide(request, hardware=hardware, compute="bf16", masked=module.mask_reason(window, longest))

    @pytest.mark.parametrize(
        ("window", "longest", "expected"),
        [(None, 4096, "flash"), (512, 511, "flash"), (512, 512, "mem_efficient"), (512, 2048, "mem_efficient")],
    )
    def test_flash_gives_way_where_the_window_binds(self, window, longest, expected):
        assert self.plan(window, longest)[0].expected.value == expected

    def test_on_a_cpu_flash_takes_the_mask(self):
        plan, _ = self.plan(512, 2048, CPU)
        assert plan.expected.value == "flash"
        assert [gives(plan.kernels.reason, one) for one in ("mask", 512, 2048)] == [True] * 3

    def test_flash_by_hand_is_refused_with_the_reason(self):
        _, notes = self.plan(512, 2048, request={"flash": "on"})
        assert keys(notes) == ["attention.flash"]
        assert gives(notes.faults[0].what, "GPU")
        assert gives(notes.faults[0].what, "mask")


class TestWithoutSdpa:
    def plan(self, request):
        return decide(request, hardware=H100, compute="bf16", without_sdpa="scores are capped")

    def test_the_default_is_eager_with_the_reason(self):
        plan, notes = self.plan("auto")
        assert summary(plan) == ("eager", (), "eager")
        assert plan.implementation.reason == "scores are capped"
        assert not notes.faults

    @pytest.mark.parametrize("request_", ["sdpa", {"math": "on"}])
    def test_sdpa_is_refused(self, request_):
        assert keys(self.plan(request_)[1]) == ["attention"]

    @pytest.mark.parametrize("request_", ["eager", "flash_attention_2"])
    def test_what_can_cap_is_not(self, request_):
        plan, notes = self.plan(request_)
        assert plan.implementation.value == request_
        assert not notes.faults


class TestDeterministicForms:
    def test_they_decide_nothing_about_the_kernel(self):
        trials = [trial("flash", 3.0), *(trial(form, 0.1) for form in with_deterministic(["flash"])[1:])]
        plan, _ = decide(hardware=H100, compute="bf16", trials=trials)
        assert plan.expected.value == "flash"
        assert "deterministic" not in plan.expected.reason

    def test_cudnn_has_none_and_is_not_chosen_where_one_is_asked_for(self):
        trials = [trial("flash", 3.0), trial("cudnn", 1.0)]
        named = {"hardware": H100, "compute": "bf16", "trials": trials, "uniform": True}
        assert decide({"deterministic": "on"}, **named)[0].expected.value == "flash"
        assert decide({"deterministic": "auto"}, **named)[0].expected.value == "cudnn"  # twin
