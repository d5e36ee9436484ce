"""SFT, pretrain, reward, DPO, KTO, PPO, GRPO, distillation: the data, models and loss of each."""
