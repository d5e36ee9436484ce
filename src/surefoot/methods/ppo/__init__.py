"""PPO: rollouts, scores, advantages, and the models that take part."""
