"""PPO agent of the game: policy network, learner, search and training (Schulman et al. 2017)."""
