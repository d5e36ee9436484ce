"""SFT, pretrain, reward, DPO, KTO, PPO, GRPO: what each learns from, with which models and which loss."""
