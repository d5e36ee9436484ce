"""Stage ppo: prompts are answered, answers scored, and the policy learns from them within bounds."""
