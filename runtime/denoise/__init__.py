"""The life of a diffusion model's requests: encode the shared prefix, then denoise."""
