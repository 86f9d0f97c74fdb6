"""BiCache: the shared prefix of diffusion models, reused in shallow layers."""
