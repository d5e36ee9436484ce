"""SFT, pretrain, reward, DPO, KTO, PPO, GRPO: the data, models and loss of each."""
