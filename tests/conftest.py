"""Settings for all tests."""

from hypothesis import settings

# No deadlines: a shared machine can be slow for a moment. derandomize: a failure here is a failure everywhere.
settings.register_profile("surefoot", deadline=None, derandomize=True)
settings.load_profile("surefoot")
