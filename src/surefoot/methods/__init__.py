"""SFT, pretrain, reward, DPO, KTO, PPO: what each learns from, with which models and which loss."""
