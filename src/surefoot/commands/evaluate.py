"""`surefoot evaluate`: the group of measurements on a model. Each module is imported when its command is called."""

from __future__ import annotations

from surefoot.commands.main import Entry, LazyGroup

MEASUREMENTS = {
    "loss": Entry("surefoot.commands.evaluate_loss", "Loss, perplexity and token accuracy on a file."),
    "reward": Entry("surefoot.commands.evaluate_reward", "How well a reward model ranks pairs of answers."),
    "commonsense": Entry("surefoot.commands.evaluate_commonsense", "Eight question sets beside the published numbers."),
    "harness": Entry("surefoot.commands.evaluate_harness", "Tasks of lm-evaluation-harness, offline ones included."),
    "norms": Entry("surefoot.commands.evaluate_norms", "Norms of activations, attention on the first token, by layer."),
}

evaluate = LazyGroup(
    MEASUREMENTS,
    name="evaluate",
    help="Measure MODEL: a base model, an adapter, a run, a checkpoint or a merged model. "
    "With an adapter the base alone stands beside it.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
