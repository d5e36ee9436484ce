"""Rewards: user functions, servers, and surefoot's graders; each score comes with its reason."""
